// What all kernels share: bits of numbers, the grid of a format, threads.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__x86_64__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // gcc 12's own header
#include <immintrin.h>
#endif

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE inline __attribute__((always_inline))
// Loops are functions of their own, with parameters copied to local constants: seeing how they were
// made, or fearing that a store might change them, gcc would not vectorise.
#define NOINLINE __attribute__((noinline))
#define SIMD _Pragma("omp simd")

namespace {

constexpr int64_t TILE = 1024;  // elements worked on while they stay in the first cache
constexpr uint32_t INF = 0x7f800000u, NOT_A_NUMBER = 0x7fc00000u, MAGNITUDE = 0x7fffffffu;

enum Rounding { EVEN, AWAY, ZERO, UP, DOWN, STOCHASTIC };
enum Flag { SUBNORMALS = 1, SIGNED = 2, NEGATIVE_ZERO = 4, INTEGER = 8, HAS_NAN = 16 };

typedef uint16_t unaligned16 __attribute__((aligned(1), may_alias));
typedef uint32_t unaligned32 __attribute__((aligned(1), may_alias));

INLINE uint32_t bits_of(float x) { return __builtin_bit_cast(uint32_t, x); }
INLINE uint64_t bits_of(double x) { return __builtin_bit_cast(uint64_t, x); }
INLINE float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }
INLINE double float_of(uint64_t bits) { return __builtin_bit_cast(double, bits); }
INLINE float power_of_two(int e) { return float_of(uint32_t(e + 127) << 23); }
INLINE double double_power_of_two(int e) {
  return __builtin_bit_cast(double, uint64_t(e + 1023) << 52);
}
INLINE bool is_normal(float x) {
  const uint32_t field = bits_of(x) & INF;
  return field != 0 && field != INF;
}
INLINE int exponent_of(float power) { return int(bits_of(power) >> 23 & 0xff) - 127; }

}  // namespace

// What native.py fills in; grid.py explains the words.
struct Grid {
  int32_t mantissa_bits, min_exponent, bits, flags;
  uint32_t largest, largest_code, overflow_code, infinite_code, infinity_code, nan_code;
  float largest_value, overflow_value, infinite_value;
  const float* table;  // value of every code, for formats decoded by looking up; else null
  bool has(Flag flag) const { return flags & flag; }
};

// What native.py fills in: where a format overflows, as a fraction in [1/2, 1) and an exponent.
struct Limits {
  uint32_t fraction;  // its bits behind the leading one
  int32_t exponent, inclusive, lowest, highest;
};

namespace {

// ---- threads
// -------------------------------------------------------------------------------------

template <class Body>
void parallel(int64_t n, int threads, Body body) {  // body(begin, end), whole tiles each
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    {
      int64_t tiles = (n + TILE - 1) / TILE, t = omp_get_thread_num(), all = omp_get_num_threads();
      int64_t begin = tiles * t / all * TILE, end = tiles * (t + 1) / all * TILE;
      if (end > n) end = n;
      if (begin < end) body(begin, end);
    }
    return;
  }
#endif
  if (n > 0) body(0, n);
}

}  // namespace
