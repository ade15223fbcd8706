// Exact sums: what float64 drops is kept, so that a sum of any length is rounded once.
#pragma once

#include "numbers.hpp"

namespace {

#if defined(__AVX512F__)
constexpr int VECTOR = 64;
#else
constexpr int VECTOR = 32;
#endif

template <class T>
struct Vector;
template <>
struct Vector<float> {
  typedef float V __attribute__((vector_size(VECTOR)));
  typedef uint32_t U __attribute__((vector_size(VECTOR)));
  typedef int32_t S __attribute__((vector_size(VECTOR)));
  typedef uint32_t Bits;
  static constexpr int MANTISSA = 23, BIAS = 127;
};
template <>
struct Vector<double> {
  typedef double V __attribute__((vector_size(VECTOR)));
  typedef uint64_t U __attribute__((vector_size(VECTOR)));
  typedef int64_t S __attribute__((vector_size(VECTOR)));
  typedef uint64_t Bits;
  static constexpr int MANTISSA = 52, BIAS = 1023;
};

// x + y = sum + error exactly (Knuth's TwoSum); T is double or a vector of them. Every term here is
// a multiple of 2**-298 below 2**257, so nothing underflows and only infinities overflow.
template <class T>
INLINE T two_sum(T x, T y, T& error) {
  const T sum = x + y, z = sum - x;
  error = (x - (sum - z)) + (y - z);
  return sum;
}

// Rounding to odd: of the two neighbours of sum + error, the one whose last bit is 1, unless sum is
// exact. That bit is "sticky": rounding the result to at most 50 bits, in whatever direction, gives
// what rounding the exact sum would give (Boldo and Melquiond, 2008). An error that is NaN, beside
// a sum that is not finite, changes nothing.
INLINE double to_odd(double sum, double error) {
  const uint64_t u = bits_of(sum), inexact = error < 0 || error > 0;
  const uint64_t step = (u ^ bits_of(error)) >> 63 ? ~uint64_t(0) : uint64_t(1);
  return float_of(u + (step & (0 - (inexact & ~u & 1))));
}
INLINE Vector<double>::V to_odd(Vector<double>::V sum, Vector<double>::V error) {
  typedef Vector<double>::U U;
  typedef Vector<double>::S S;
  const U u = (U)sum, opposite = (u ^ (U)error) >> 63;
  const U inexact = (U)((error < 0) | (error > 0)) & ((u & 1) - 1);
  return (Vector<double>::V)(u + ((U)((S)(1 - 2 * opposite)) & inexact));
}
template <class T>
INLINE T odd_sum(T x, T y) {
  T error;
  const T sum = two_sum(x, y, error);
  return to_odd(sum, error);
}

// The sum of any finite doubles that are multiples of 2**-320 and below 2**270, as a fixed-point
// number: digit i counts 2**(32 * i - 320). A digit takes more than 2**29 terms before it is full.
class Total {
  static constexpr int DIGITS = 22, LOWEST = -320;
  int64_t digits[DIGITS];

 public:
  void clear() { memset(digits, 0, sizeof digits); }
  void add(double x) {
    const uint64_t u = bits_of(x);
    const int field = int(u >> 52 & 0x7ff);
    if (field == 0) return;  // zero: there are no subnormal terms
    const int place = field - 1075 - LOWEST;  // of the last bit; negative only if it is 0
    uint64_t significand = (u & ((uint64_t(1) << 52) - 1)) | uint64_t(1) << 52;
    int from = place;
    if (from < 0) significand >>= -from, from = 0;
    const unsigned __int128 wide = (unsigned __int128)significand << (from % 32);
    for (int i = 0; i < 3; i++) {
      const int64_t part = int64_t(uint64_t(wide >> (32 * i)) & 0xffffffffu);
      digits[from / 32 + i] += u >> 63 ? -part : part;
    }
  }
  // The sum, rounded to odd; zero is positive.
  double rounded_to_odd() {
    carry();
    const bool negative = digits[DIGITS - 1] < 0;
    if (negative) {
      for (int64_t& digit : digits) digit = -digit;
      carry();
    }
    // From the top: as soon as the sum is inexact, what follows is less than its last bit.
    double sum = 0;
    for (int i = DIGITS - 1; i >= 0; i--)
      sum = odd_sum(sum, double(digits[i]) * double_power_of_two(32 * i + LOWEST));
    return negative ? -sum : sum;
  }

 private:
  void carry() {  // digits from 0 to 2**32 - 1, but for the sign of the highest
    for (int i = 0; i + 1 < DIGITS; i++) {
      const int64_t over = digits[i] >> 32;
      digits[i] -= over * (int64_t(1) << 32);
      digits[i + 1] += over;
    }
  }
};

}  // namespace
