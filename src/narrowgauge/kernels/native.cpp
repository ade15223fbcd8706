// The kernels as machine code: rounding, packing, unpacking and summing numbers in narrow formats.
//
// extern "C" on raw pointers, no Python and no torch, so one build serves every version of both.
// CMake compiles this file once per instruction level and native.py picks one at run time; loops are
// plain and left to the compiler to vectorise. Results equal reference.py bit for bit at every
// level and for every number of threads, which needs -ffp-contract=off and forbids -ffast-math.
//
// If the caller's thread flushes subnormals (torch.set_flush_denormal), float32 subnormals, input or
// output, may count as zero here; every other result is independent of the MXCSR register.

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

namespace {

// ---- threads -------------------------------------------------------------------------------------

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

// ---- random words: Philox4x32-7, counter (block, 0), four words per block --------------------------

#if defined(__AVX512F__)
typedef uint64_t lanes __attribute__((vector_size(64)));
INLINE lanes multiply(lanes a, lanes b) { return (lanes)_mm512_mul_epu32((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
typedef uint64_t lanes __attribute__((vector_size(32)));
INLINE lanes multiply(lanes a, lanes b) { return (lanes)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
#elif defined(__SSE2__)
typedef uint64_t lanes __attribute__((vector_size(16)));
INLINE lanes multiply(lanes a, lanes b) { return (lanes)_mm_mul_epu32((__m128i)a, (__m128i)b); }
#else
typedef uint64_t lanes __attribute__((vector_size(16)));
INLINE lanes multiply(lanes a, lanes b) { return (a & 0xffffffffu) * (b & 0xffffffffu); }
#endif
constexpr int LANES = sizeof(lanes) / 8;

struct Philox {
  static constexpr uint32_t ROUNDS = 7;  // the fewest that pass BigCrush (Salmon et al., 2011)
  lanes key0[ROUNDS], key1[ROUNDS], count, even, odd;
  explicit Philox(uint64_t key) {
    for (uint32_t r = 0; r < ROUNDS; r++) {
      key0[r] = lanes{} + uint64_t(uint32_t(key) + r * 0x9E3779B9u);
      key1[r] = lanes{} + uint64_t(uint32_t(key >> 32) + r * 0xBB67AE85u);
    }
    for (int i = 0; i < LANES; i++) {
      count[i] = uint64_t(i);
      even[i] = uint64_t(i / 2 + i % 2 * LANES);
      odd[i] = even[i] + LANES / 2;
    }
  }
  // The words of a tile that begins at element `first`, a multiple of 4.
  NOINLINE void tile(uint32_t* words, int64_t first) const {
    constexpr int SIDE = 2;  // chains side by side, so that none waits for its multiplications
    for (int64_t block = 0; block < TILE / 4; block += SIDE * LANES) {
      lanes x0[SIDE], x1[SIDE], x2[SIDE], x3[SIDE];
      for (int s = 0; s < SIDE; s++) {
        x0[s] = count + uint64_t(first / 4 + block + s * LANES);
        x1[s] = x0[s] >> 32, x2[s] = lanes{}, x3[s] = lanes{};
      }
      // `multiply` reads only the low half of each lane: the high ones may hold anything meanwhile.
#pragma GCC unroll 7
      for (uint32_t r = 0; r < ROUNDS; r++)
#pragma GCC unroll 2
        for (int s = 0; s < SIDE; s++) {
          const lanes p0 = multiply(x0[s], lanes{} + 0xD2511F53u), p1 = multiply(x2[s], lanes{} + 0xCD9E8D57u);
          x0[s] = (p1 >> 32) ^ x1[s] ^ key0[r];
          x1[s] = p1;
          x2[s] = (p0 >> 32) ^ x3[s] ^ key1[r];
          x3[s] = p0;
        }
      for (int s = 0; s < SIDE; s++) {
        const lanes low = (x0[s] & 0xffffffffu) | x1[s] << 32, high = (x2[s] & 0xffffffffu) | x3[s] << 32;
        const lanes halves[2] = {__builtin_shuffle(low, high, even), __builtin_shuffle(low, high, odd)};
        memcpy(words + 4 * (block + s * LANES), halves, sizeof halves);
      }
    }
  }
};

// ---- rounding in general: any mode, any grid, on the bits as integers -------------------------------

template <class T> struct Type;
template <> struct Type<float> {
  typedef uint32_t U;
  typedef int32_t S;
  static constexpr int MANTISSA = 23, BIAS = 127, CAP = 31;
};
template <> struct Type<double> {
  typedef uint64_t U;
  typedef int64_t S;
  static constexpr int MANTISSA = 52, BIAS = 1023, CAP = 62;
};

// The grid in the words of float or double: `code` says whether results are codes or values. Every
// field is as wide as an element, and flags are masks, so that the loop below vectorises.
template <class T> struct General {
  typedef typename Type<T>::U U;
  typedef typename Type<T>::S S;
  S m, emin, wider, exponent;
  U parity, unit, least, largest, top, overflow, infinite, nan;
  U sign, result_sign, negative_zero, integer, bits_mask, adjust, threshold, care, limit;
  T subnormal;
  General(const Grid& g, bool code, int exponent_)
      : m(g.mantissa_bits), emin(g.min_exponent), wider(g.has(SUBNORMALS) ? 0 : g.mantissa_bits),
        exponent(exponent_), unit(U(1) << g.mantissa_bits), largest(g.largest) {
    parity = least = g.has(SIGNED) ? 0 : 1;  // without zero, codes are ordinals less one
    sign = U(1) << (sizeof(T) * 8 - 1);
    result_sign = code ? (g.has(SIGNED) ? U(1) << (g.bits - 1) : U(0)) : sign;
    negative_zero = g.has(NEGATIVE_ZERO);
    integer = g.has(INTEGER) ? ~U(0) : U(0);
    bits_mask = (U(1) << g.bits) - 1;
    adjust = U(S(emin + Type<T>::BIAS - 1)) << Type<T>::MANTISSA;
    // In float the caller makes sure that emin >= -126; there `adjust` is 0 and ordinals below and
    // above the smallest normal number are shifted bits alike.
    threshold = adjust ? unit : U(0);
    subnormal = T(double_power_of_two(int(emin - m)));
    top = code ? g.largest_code : bits_of(T(g.largest_value));
    overflow = code ? g.overflow_code : bits_of(T(g.overflow_value));
    infinite = code ? g.infinite_code : bits_of(T(g.infinite_value));
    nan = code ? g.nan_code : bits_of(T(float_of(NOT_A_NUMBER)));
    care = g.has(SIGNED) ? ~sign : ~U(0);
    limit = (U(2 * Type<T>::BIAS + 1) << Type<T>::MANTISSA) - least;
  }
};

template <Rounding R, bool CODE, class T>
INLINE typename Type<T>::U round_one(T x, uint32_t word, const General<T>& g) {
  typedef typename Type<T>::U U;
  typedef typename Type<T>::S S;
  constexpr int M = Type<T>::MANTISSA, CAP = Type<T>::CAP;
  constexpr U infinity = U(2 * Type<T>::BIAS + 1) << M;
  const U u = bits_of(x), magnitude = u & ~g.sign;
  const U negative = S(u) < 0 ? ~U(0) : U(0);
  const S field = S(magnitude >> M);
  const U significand = (magnitude & ((U(1) << M) - 1)) | (field > 0 ? U(1) << M : U(0));
  const S e = (field > 1 ? field : S(1)) - Type<T>::BIAS + g.exponent;
  const S clamped = e < g.emin ? g.emin : e;
  // Without subnormals the spacing below the smallest normal number is that number itself.
  const S wider = e < g.emin ? g.wider : S(0);
  const S shift = clamped - e + M - g.m + wider;
  const S capped = shift > CAP ? S(CAP) : shift;
  const U kept = significand >> capped, rest = significand - (kept << capped);
  const U truncated = (U(clamped - g.emin) << g.m) + (kept << wider);
  U up = 0, toward_zero = R == ZERO ? ~U(0) : U(0);
  if constexpr (R == EVEN) {
    up = 2 * rest + ((truncated + g.parity) & 1) > U(1) << capped ? U(1) : U(0);
  } else if constexpr (R == AWAY) {
    up = 2 * rest >= U(1) << capped ? U(1) : U(0);
  } else if constexpr (R == UP || R == DOWN) {
    toward_zero = R == UP ? negative : ~negative;
    up = rest != 0 ? U(1) & ~toward_zero : U(0);
  } else if constexpr (R == STOCHASTIC) {
    S left = 32 - shift, right = shift - 32;
    left = left < 0 ? S(0) : left > 31 ? S(31) : left;
    right = right < 0 ? S(0) : right > CAP ? S(CAP) : right;
    const U fraction = (rest << left) >> right;
    if constexpr (sizeof(U) == 4)
      up = U(fraction + word) < fraction ? U(1) : U(0);
    else
      up = (fraction + word) >> 32;
  }
  const U rounded = truncated + (up << wider);
  const U ordinal = rounded < g.least ? g.least : rounded;
  U result;
  if constexpr (CODE) {
    result = ordinal - g.least;
  } else {
    const U normal = (ordinal << (M - g.m)) + g.adjust;
    // Adding 2**M by its bits converts a small integer.
    constexpr U base = U(Type<T>::BIAS + M) << M;
    const T small = float_of(U(ordinal | base)) - float_of(base);
    result = ordinal < g.threshold ? bits_of(small * g.subnormal) : normal;
  }
  const U beyond = R == ZERO ? g.top : (g.top & toward_zero) | (g.overflow & ~toward_zero);
  result = ordinal > g.largest ? beyond : result;
  result = magnitude == infinity ? g.infinite : result;
  if constexpr (CODE) {
    const U negated = ((result ^ negative) - negative) & g.bits_mask;
    const U with_sign = (result | g.negative_zero) != 0 ? result | (negative & g.result_sign) : result;
    result = (negated & g.integer) | (with_sign & ~g.integer);
  } else {
    const U with_sign = result | (negative & g.result_sign);
    result = result > infinity ? g.nan : (result | g.negative_zero) != 0 ? with_sign : result;
  }
  // NaN, and without a sign also zero and everything negative.
  return (u & g.care) - g.least > g.limit ? g.nan : result;
}

template <Rounding R, class T, class Out>  // Out: T for values, an integer for codes
NOINLINE void round_general(const T* x, Out* out, int64_t n, const General<T>& grid, const uint32_t* words) {
  const General<T> g = grid;
  SIMD for (int64_t i = 0; i < n; i++) {
    const uint32_t word = R == STOCHASTIC ? words[i] : 0;
    if constexpr (sizeof(Out) < 4)
      out[i] = Out(round_one<R, true>(x[i], word, g));
    else
      out[i] = float_of(round_one<R, false>(x[i], word, g));
  }
}

template <class T, class Out>
void round_in(Rounding r, const T* x, Out* out, int64_t n, const General<T>& g, const uint32_t* words) {
  switch (r) {
    case EVEN: return round_general<EVEN>(x, out, n, g, words);
    case AWAY: return round_general<AWAY>(x, out, n, g, words);
    case ZERO: return round_general<ZERO>(x, out, n, g, words);
    case UP: return round_general<UP>(x, out, n, g, words);
    case DOWN: return round_general<DOWN>(x, out, n, g, words);
    case STOCHASTIC: return round_general<STOCHASTIC>(x, out, n, g, words);
  }
}

uint32_t largest_magnitude(const float* x, int64_t n) {
  constexpr int WIDTH = 64;  // several vectors side by side, so that none waits for another
  int32_t most[WIDTH] = {}, all = 0;
  for (; n >= WIDTH; n -= WIDTH, x += WIDTH)
    SIMD for (int i = 0; i < WIDTH; i++) {
      const int32_t a = int32_t(bits_of(x[i]) & MAGNITUDE);
      most[i] = a > most[i] ? a : most[i];
    }
  for (int64_t i = 0; i < n; i++) most[i] = int32_t(bits_of(x[i]) & MAGNITUDE) > most[i] ? int32_t(bits_of(x[i]) & MAGNITUDE) : most[i];
  for (int32_t each : most) all = each > all ? each : all;
  return uint32_t(all);
}

// ---- rounding to nearest-even, float32: the common case at the speed of memory ---------------------

struct Fast {
  // Above `threshold` (the smallest normal number) ordinals are the bits less `adjust`, shifted;
  // below it, adding and subtracting `magic` rounds to a multiple of the spacing.
  uint32_t adjust, half, threshold, top, overflow, infinite, nan, largest, mask, zero_sign;
  uint32_t min_bits, cap_bits, add_bits;  // for values: see round_magic
  int shift, sign_shift;
  float magic;
  bool possible, possible_magic, possible_stochastic, integer;
  Fast(const Grid& g, bool code)
      : largest(g.largest), zero_sign(g.has(NEGATIVE_ZERO)), shift(23 - g.mantissa_bits),
        sign_shift(32 - g.bits), integer(g.has(INTEGER)) {
    const int m = g.mantissa_bits, emin = g.min_exponent;
    possible = g.has(SUBNORMALS) && g.has(SIGNED) && m < 23 && emin >= -126 && emin + 23 - m <= 127;
    if (!possible) return;
    adjust = uint32_t(emin + 126) << 23;
    half = (1u << (shift - 1)) - 1;
    mask = ~((1u << shift) - 1);
    threshold = emin == -126 ? 0 : uint32_t(emin + 127) << 23;
    magic = power_of_two(emin + shift);
    top = bits_of(g.largest_value);
    overflow = code ? g.overflow_code : bits_of(g.overflow_value);
    infinite = code ? g.infinite_code : bits_of(g.infinite_value);
    nan = code ? g.nan_code : NOT_A_NUMBER;
    const int emax = int(top >> 23) - 127, cap = emax + 1 < 103 + m ? emax + 1 : 103 + m;
    possible_magic = !code && m > 0 && emax <= 103 + m && overflow == infinite && overflow != NOT_A_NUMBER && zero_sign;
    possible_stochastic = emin - m >= -94;
    min_bits = uint32_t(emin + 127) << 23;
    cap_bits = uint32_t(cap + 127) << 23;
    add_bits = (uint32_t(shift) << 23) | 0x400000u;
  }
};

// (x + c) - c with c = 1.5 * 2**(e + 23 - m) rounds x to m bits, normal or not: the shortest kernel,
// for formats whose exponents leave room for c, whose ties are even in value as in code (m > 0), and
// that treat overflow and infinity alike.
NOINLINE void round_magic(const float* x, float* out, int64_t n, const Fast& fast) {
  const Fast f = fast;
  SIMD for (int64_t i = 0; i < n; i++) {
    const uint32_t u = bits_of(x[i]);
    uint32_t e = u & INF;
    e = e < f.min_bits ? f.min_bits : e;
    e = e > f.cap_bits ? f.cap_bits : e;
    const float c = float_of(e + f.add_bits);
    const uint32_t y = bits_of((x[i] + c) - c) & MAGNITUDE;
    uint32_t r = y > f.top ? f.overflow : y;
    r |= u & ~MAGNITUDE;
    out[i] = float_of(y > INF ? NOT_A_NUMBER : r);
  }
}

NOINLINE void round_fast(const float* x, float* out, int64_t n, const Fast& fast) {
  const Fast f = fast;
  SIMD for (int64_t i = 0; i < n; i++) {
    const uint32_t u = bits_of(x[i]), a = u & MAGNITUDE, t = a - f.adjust;
    const uint32_t normal = ((t + ((t >> f.shift) & 1) + f.half) & f.mask) + f.adjust;
    const uint32_t small = bits_of((float_of(a) + f.magic) - f.magic);
    uint32_t r = int32_t(a) < int32_t(f.threshold) ? small : normal;
    r = int32_t(r) > int32_t(f.top) ? f.overflow : r;
    r = a == INF ? f.infinite : r;
    r = int32_t(a) > int32_t(INF) ? NOT_A_NUMBER : r;
    r |= (r | f.zero_sign) && int32_t(r) <= int32_t(INF) ? u & ~MAGNITUDE : 0;
    out[i] = float_of(r);
  }
}

// The general rule with all that most formats never need taken out: grids far above float32's own
// subnormals, whose hidden bit then may be wrong, as it is shifted out of sight.
NOINLINE void round_stochastic(const float* x, float* out, int64_t n, const Fast& fast, const uint32_t* words) {
  const Fast f = fast;
  const int32_t lowest = int32_t(f.min_bits >> 23), m = 23 - f.shift;
  SIMD for (int64_t i = 0; i < n; i++) {
    const uint32_t u = bits_of(x[i]), a = u & MAGNITUDE;
    const uint32_t significand = (a & 0x7fffffu) | 0x800000u;
    const int32_t field = int32_t(a >> 23), clamped = field < lowest ? lowest : field;
    const int32_t shift = clamped - field + f.shift, capped = shift < 31 ? shift : 31;
    const int32_t left = shift < 32 ? 32 - shift : 0, right = shift - 32;
    const uint32_t kept = significand >> capped, rest = significand - (kept << capped);
    const int32_t down = right < 0 ? 0 : right > 31 ? 31 : right;
    const uint32_t fraction = (rest << left) >> down;
    const uint32_t ordinal = kept + (fraction + words[i] < fraction ? 1u : 0u);
    uint32_t r = bits_of(float(int32_t(ordinal)) * float_of(uint32_t(clamped - m) << 23));
    r = int32_t(r) > int32_t(f.top) ? f.overflow : r;
    r = a == INF ? f.infinite : r;
    r = int32_t(a) > int32_t(INF) ? NOT_A_NUMBER : r;
    r |= (r | f.zero_sign) && int32_t(r) <= int32_t(INF) ? u & ~MAGNITUDE : 0;
    out[i] = float_of(r);
  }
}

template <bool SCALED, bool TWOS_COMPLEMENT, class Code>
NOINLINE void encode_fast(const float* x, Code* out, int64_t n, const Fast& fast, float scale) {
  const Fast f = fast;
  const uint32_t magic = bits_of(f.magic), sign_bit = 0x80000000u >> f.sign_shift;
  const uint32_t bits_mask = 2 * sign_bit - 1;
  SIMD for (int64_t i = 0; i < n; i++) {
    const uint32_t u = bits_of(x[i]), a = u & MAGNITUDE;
    uint32_t b = a;
    if constexpr (SCALED) {  // a finite number whose scaled value leaves float32 is still finite
      b = bits_of(float_of(a) * scale);
      b = b < INF - 1 ? b : INF - 1;
    }
    const uint32_t t = b - f.adjust;
    const uint32_t normal = (t + ((t >> f.shift) & 1) + f.half) >> f.shift;
    const uint32_t small = bits_of(float_of(b) + f.magic) - magic;
    uint32_t r = int32_t(b) < int32_t(f.threshold) ? small : normal;
    r = int32_t(r) > int32_t(f.largest) ? f.overflow : r;
    r = a == INF ? f.infinite : r;
    if constexpr (TWOS_COMPLEMENT)
      r = (int32_t(u) < 0 ? 0 - r : r) & bits_mask;
    else
      r |= r | f.zero_sign ? u >> f.sign_shift & sign_bit : 0;
    out[i] = Code(int32_t(a) > int32_t(INF) ? f.nan : r);
  }
}

// ---- packing: groups of 8 elements are exactly `bits` bytes ----------------------------------------

template <int BITS> INLINE uint64_t gather_bits(uint64_t codes, [[maybe_unused]] uint64_t lane_mask, [[maybe_unused]] int lane) {
#ifdef __BMI2__
  return _pext_u64(codes, lane_mask);
#else
  uint64_t word = 0;
  for (int i = 0; i < 64 / lane; i++) word |= (codes >> (i * lane) & ((1ull << BITS) - 1)) << (i * BITS);
  return word;
#endif
}

template <int BITS> INLINE uint64_t spread_bits(uint64_t word, [[maybe_unused]] uint64_t lane_mask, [[maybe_unused]] int lane) {
#ifdef __BMI2__
  return _pdep_u64(word, lane_mask);
#else
  uint64_t codes = 0;
  for (int i = 0; i < 64 / lane; i++) codes |= (word >> (i * BITS) & ((1ull << BITS) - 1)) << (i * lane);
  return codes;
#endif
}

template <int BITS> struct Packing {
  static constexpr bool WIDE = BITS > 8;
  static constexpr int LANE = WIDE ? 16 : 8;
  static constexpr uint64_t MASK =
      ((1ull << BITS) - 1) * (WIDE ? 0x0001000100010001ull : 0x0101010101010101ull);
  static INLINE void pack_group(const void* codes, uint8_t* out) {
    uint64_t c[2] = {0, 0}, word;
    memcpy(c, codes, WIDE ? 16 : 8);
    word = gather_bits<BITS>(c[0], MASK, LANE);
    if constexpr (WIDE) {
      const uint64_t high = gather_bits<BITS>(c[1], MASK, LANE);
      constexpr int USED = 4 * BITS % 64;  // 36 to 60, or 0 when unused
      c[0] = word | high << USED;
      c[1] = high >> (63 - USED) >> 1;
      memcpy(out, c, BITS);
    } else {
      memcpy(out, &word, BITS);
    }
  }
  // Reads 8 bytes from the group's first one on, and if it is wide, its last 8 bytes.
  static INLINE void unpack_group(const uint8_t* in, void* codes) {
    uint64_t word, c[2];
    memcpy(&word, in, 8);
    c[0] = spread_bits<BITS>(word, MASK, LANE);
    if constexpr (WIDE) {
      memcpy(&word, in + BITS - 8, 8);
      c[1] = spread_bits<BITS>(word >> (64 - 4 * BITS), MASK, LANE);
    }
    memcpy(codes, c, WIDE ? 16 : 8);
  }
};

template <int BITS, class Code>
void pack(const Code* codes, uint8_t* out, int64_t n) {
  for (; n >= 8; n -= 8, codes += 8, out += BITS) Packing<BITS>::pack_group(codes, out);
  if (n) {
    Code last[8] = {};
    uint8_t bytes[16];
    memcpy(last, codes, n * sizeof(Code));
    Packing<BITS>::pack_group(last, bytes);
    memcpy(out, bytes, (n * BITS + 7) / 8);
  }
}

template <int BITS, class Code>
void unpack(const uint8_t* in, Code* codes, int64_t n) {
  for (; n >= 8 && n * BITS >= 64; n -= 8, codes += 8, in += BITS) Packing<BITS>::unpack_group(in, codes);
  while (n > 0) {  // too few bytes left to read 8 at once
    const int64_t count = n < 8 ? n : 8;
    Code last[8];
    uint8_t bytes[16] = {};
    memcpy(bytes, in, (count * BITS + 7) / 8);
    Packing<BITS>::unpack_group(bytes, last);
    memcpy(codes, last, count * sizeof(Code));
    n -= count, codes += count, in += BITS;
  }
}

#define EACH_NARROW(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7)
#define EACH_WIDE(X) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#define PACK(B) case B: return pack<B>(codes, out, n);
#define UNPACK(B) case B: return unpack<B>(in, codes, n);
void pack(int bits, const uint8_t* codes, uint8_t* out, int64_t n) { switch (bits) { EACH_NARROW(PACK) } }
void pack(int bits, const uint16_t* codes, uint8_t* out, int64_t n) { switch (bits) { EACH_WIDE(PACK) } }
void unpack(int bits, const uint8_t* in, uint8_t* codes, int64_t n) { switch (bits) { EACH_NARROW(UNPACK) } }
void unpack(int bits, const uint8_t* in, uint16_t* codes, int64_t n) { switch (bits) { EACH_WIDE(UNPACK) } }

// ---- encoding --------------------------------------------------------------------------------------

// Encodes runs of elements that share a scale into a tile of codes.
struct Encoder {
  const Grid& grid;
  Rounding rounding;
  Fast fast;
  Philox philox;
  Encoder(const Grid& g, int r, uint64_t key)
      : grid(g), rounding(Rounding(r)), fast(g, true), philox(key) {}

  bool spoilt(const float* x, int64_t n) const {
    return largest_magnitude(x, n) > INF;
  }
  bool spoilt(const double* x, int64_t n) const {
    bool found = false;
    for (int64_t i = 0; i < n; i++) found |= x[i] != x[i];
    return found;
  }
  template <class Code> void run(const float* x, Code* out, int64_t n, float scale, const uint32_t* words) const {
    const int k = exponent_of(scale);
    // Scaling down may round in float32, which is harmless only if it happens far below the grid.
    const bool exact = k >= 0 || grid.min_exponent - grid.mantissa_bits >= -125;
    if (rounding == EVEN && fast.possible && exact) {
      if (fast.integer)
        k ? encode_fast<true, true>(x, out, n, fast, scale) : encode_fast<false, true>(x, out, n, fast, scale);
      else
        k ? encode_fast<true, false>(x, out, n, fast, scale) : encode_fast<false, false>(x, out, n, fast, scale);
    } else if (k == 0 && grid.min_exponent >= -126) {
      round_in(rounding, x, out, n, General<float>(grid, true, 0), words);
    } else {
      double wide[TILE];
      for (int64_t i = 0; i < n; i++) wide[i] = double(x[i]);
      run(wide, out, n, scale, words);
    }
  }
  template <class Code> void run(const double* x, Code* out, int64_t n, float scale, const uint32_t* words) const {
    round_in(rounding, x, out, n, General<double>(grid, true, exponent_of(scale)), words);
  }
  // Elements [first, first + n) of a tensor, n <= TILE, as codes; returns whether NaN spoilt them.
  template <class T, class Code>
  bool tile(const T* x, Code* out, int64_t first, int64_t n, const float* scales, int64_t block) const {
    uint32_t words[TILE];
    if (rounding == STOCHASTIC) philox.tile(words, first);
    bool found = false;
    for (int64_t i = 0; i < n;) {
      int64_t length = n - i;
      if (block) {
        const int64_t left = block - (first + i) % block;
        length = length < left ? length : left;
      }
      const float scale = scales ? scales[block ? (first + i) / block : 0] : 1.0f;
      if (scale != scale) {
        memset(out + i, 0, length * sizeof(Code));
      } else {
        run(x + i, out + i, length, scale, words + i);
        if (!grid.has(HAS_NAN)) found |= spoilt(x + i, length);
      }
      i += length;
    }
    return found;
  }
  // The same, packed; `out` begins at element 0, and `first` is a multiple of 8.
  template <class T>
  bool packed(const T* x, uint8_t* out, int64_t first, int64_t n, const float* scales, int64_t block) const {
    const int bits = grid.bits;
    uint8_t* place = out + first / 8 * bits;
    if (bits == 8) return tile(x, place, first, n, scales, block);
    if (bits < 8) {
      uint8_t codes[TILE];
      const bool found = tile(x, codes, first, n, scales, block);
      pack(bits, codes, place, n);
      return found;
    }
    uint16_t codes[TILE];
    const bool found = tile(x, codes, first, n, scales, block);
    if (bits == 16)
      memcpy(place, codes, n * 2);
    else
      pack(bits, codes, place, n);
    return found;
  }
};

template <class T>
int encode(const T* x, uint8_t* out, int64_t n, const Grid* grid, int rounding, uint64_t key,
           const float* scales, int64_t block, int threads) {
  int found = 0;
  parallel(n, threads, [&](int64_t begin, int64_t end) {
    const Encoder encoder(*grid, rounding, key);
    bool mine = false;
    for (int64_t i = begin; i < end; i += TILE) {
      const int64_t length = end - i < TILE ? end - i : TILE;
      mine |= encoder.packed(x + i, out, i, length, scales, block);
    }
    if (mine) __atomic_store_n(&found, 1, __ATOMIC_RELAXED);
  });
  return found;
}

// ---- decoding --------------------------------------------------------------------------------------

enum Use { STORE, BEGIN_SUM, CONTINUE_SUM };  // what becomes of a decoded, scaled value

template <Use USE> INLINE void use(float* out, float value, float factor) {
  if constexpr (USE == CONTINUE_SUM) value = *out + value;
  if constexpr (USE == STORE) {
    value *= factor;
    value = value == value ? value : float_of(NOT_A_NUMBER);
  }
  *out = value;
}

struct Decoder {
  const float* table;
  uint32_t bits, sign_bit, m, shift, adjust, threshold, largest, infinity_code, lone_nan;
  float subnormal;
  bool integer;
  explicit Decoder(const Grid& g)
      : table(g.table), bits(uint32_t(g.bits)), sign_bit(1u << (g.bits - 1)),
        m(uint32_t(g.mantissa_bits)), shift(23 - m), largest(g.largest), infinity_code(g.infinity_code),
        integer(g.has(INTEGER)) {
    // FNUZ: the code of negative zero is NaN. Elsewhere no code equals `lone_nan`.
    lone_nan = !integer && g.has(HAS_NAN) && g.nan_code == sign_bit ? sign_bit : 0xffffffffu;
    if (table || integer || bits == 32) return;
    adjust = uint32_t(g.min_exponent + 126) << m;
    threshold = g.min_exponent == -126 ? 0 : 1u << m;
    subnormal = threshold ? float(double_power_of_two(g.min_exponent - g.mantissa_bits)) : 0.0f;
  }

  template <Use USE, class Code>
  static void floats(const Code* codes, float* out, int64_t n, Decoder d, float scale, float factor) {
    const uint32_t sign_shift = 32 - d.bits;
    SIMD for (int64_t i = 0; i < n; i++) {
      const uint32_t c = codes[i], a = c & (d.sign_bit - 1);
      const uint32_t normal = (a + d.adjust) << d.shift;
      const uint32_t small = bits_of(float(int32_t(a)) * d.subnormal);
      uint32_t r = int32_t(a) < int32_t(d.threshold) ? small : normal;
      r = int32_t(a) > int32_t(d.largest) ? (a == d.infinity_code ? INF : NOT_A_NUMBER) : r;
      r |= (c & d.sign_bit) << sign_shift;
      r = c == d.lone_nan ? NOT_A_NUMBER : r;
      use<USE>(out + i, float_of(r) * scale, factor);
    }
  }
  template <Use USE, class Code>
  static void integers(const Code* codes, float* out, int64_t n, Decoder d, float scale, float factor) {
    const uint32_t shift_ = 32 - d.bits;
    SIMD for (int64_t i = 0; i < n; i++)
      use<USE>(out + i, float(int32_t(uint32_t(codes[i]) << shift_) >> shift_) * scale, factor);
  }
  template <Use USE, class Code>
  void run(const Code* codes, float* out, int64_t n, float scale, float factor) const {
    if (table)
      for (int64_t i = 0; i < n; i++) use<USE>(out + i, table[codes[i]] * scale, factor);
    else if (integer)
      integers<USE>(codes, out, n, *this, scale, factor);
    else
      floats<USE>(codes, out, n, *this, scale, factor);
  }
  template <Use USE, class Code>
  void tile(const Code* codes, float* out, int64_t first, int64_t n, const float* scales, int64_t block,
            float factor) const {
    for (int64_t i = 0; i < n;) {
      int64_t length = n - i;
      if (block) {
        const int64_t left = block - (first + i) % block;
        length = length < left ? length : left;
      }
      run<USE>(codes + i, out + i, length, scales ? scales[block ? (first + i) / block : 0] : 1.0f, factor);
      i += length;
    }
  }
  // Elements [first, first + n), n <= TILE, of packed codes that begin at element 0.
  template <Use USE>
  void packed(const uint8_t* codes, float* out, int64_t first, int64_t n, const float* scales,
              int64_t block, float factor) const {
    const uint8_t* place = codes + first / 8 * bits;
    if (bits == 32) {
      const unaligned32* raw = (const unaligned32*)place;
      SIMD for (int64_t i = 0; i < n; i++) use<USE>(out + i, float_of(raw[i]), factor);
    } else if (bits == 8) {
      tile<USE>(place, out, first, n, scales, block, factor);
    } else if (bits == 16) {
      tile<USE>((const unaligned16*)place, out, first, n, scales, block, factor);
    } else if (bits < 8) {
      uint8_t unpacked[TILE];
      unpack(int(bits), place, unpacked, n);
      tile<USE>(unpacked, out, first, n, scales, block, factor);
    } else {
      uint16_t unpacked[TILE];
      unpack(int(bits), place, unpacked, n);
      tile<USE>(unpacked, out, first, n, scales, block, factor);
    }
  }
  // (sum over senders, in order) * factor, of elements [first, first + n).
  void sum(const uint8_t* const* codes, int senders, const float* scales, float* out, int64_t first,
           int64_t n, float factor) const {
    packed<BEGIN_SUM>(codes[0], out, first, n, scales, 0, 1.0f);
    for (int s = 1; s < senders; s++) packed<CONTINUE_SUM>(codes[s], out, first, n, scales + s, 0, 1.0f);
    SIMD for (int64_t i = 0; i < n; i++) use<STORE>(out + i, out[i], factor);
  }
};

}  // namespace

// ---- what native.py calls --------------------------------------------------------------------------

EXPORT int narrowgauge_interface() { return 1; }  // native.py refuses a library of another interface

EXPORT int narrowgauge_level() {  // the highest x86-64 level that this processor runs
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                  __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512cd");
  return v4 ? 4 : v3 ? 3 : 1;
#else
  return 0;
#endif
}

EXPORT void narrowgauge_round_float(const float* x, float* out, int64_t n, const Grid* grid,
                                    int rounding, uint64_t key, int threads) {
  parallel(n, threads, [=](int64_t begin, int64_t end) {
    const Fast fast(*grid, false);
    if (rounding == EVEN && fast.possible)
      return (fast.possible_magic ? round_magic : round_fast)(x + begin, out + begin, end - begin, fast);
    const bool direct = grid->min_exponent >= -126;
    const Philox philox(key);
    uint32_t words[TILE];
    for (int64_t i = begin; i < end; i += TILE) {
      const int64_t length = end - i < TILE ? end - i : TILE;
      if (rounding == STOCHASTIC) philox.tile(words, i);
      if (rounding == STOCHASTIC && fast.possible && fast.possible_stochastic) {
        round_stochastic(x + i, out + i, length, fast, words);
      } else if (direct) {
        round_in(Rounding(rounding), x + i, out + i, length, General<float>(*grid, false, 0), words);
      } else {
        double wide[TILE];
        for (int64_t j = 0; j < length; j++) wide[j] = double(x[i + j]);
        round_in(Rounding(rounding), wide, wide, length, General<double>(*grid, false, 0), words);
        for (int64_t j = 0; j < length; j++) out[i + j] = float(wide[j]);
      }
    }
  });
}

EXPORT void narrowgauge_round_double(const double* x, double* out, int64_t n, const Grid* grid,
                                     int rounding, uint64_t key, int threads) {
  parallel(n, threads, [=](int64_t begin, int64_t end) {
    const Philox philox(key);
    uint32_t words[TILE];
    for (int64_t i = begin; i < end; i += TILE) {
      const int64_t length = end - i < TILE ? end - i : TILE;
      if (rounding == STOCHASTIC) philox.tile(words, i);
      round_in(Rounding(rounding), x + i, out + i, length, General<double>(*grid, false, 0), words);
    }
  });
}

EXPORT int narrowgauge_encode_float(const float* x, uint8_t* out, int64_t n, const Grid* grid, int rounding,
                                    uint64_t key, const float* scales, int64_t block, int threads) {
  return encode(x, out, n, grid, rounding, key, scales, block, threads);
}

EXPORT int narrowgauge_encode_double(const double* x, uint8_t* out, int64_t n, const Grid* grid, int rounding,
                                     uint64_t key, const float* scales, int64_t block, int threads) {
  return encode(x, out, n, grid, rounding, key, scales, block, threads);
}

EXPORT void narrowgauge_decode(const uint8_t* codes, float* out, int64_t n, const Grid* grid,
                               const float* scales, int64_t block, float factor, int threads) {
  parallel(n, threads, [=](int64_t begin, int64_t end) {
    const Decoder decoder(*grid);
    for (int64_t i = begin; i < end; i += TILE) {
      const int64_t length = end - i < TILE ? end - i : TILE;
      decoder.packed<STORE>(codes, out + i, i, length, scales, block, factor);
    }
  });
}

EXPORT void narrowgauge_reduce(const uint8_t* const* codes, int senders, const float* scales, float* out,
                               int64_t n, const Grid* grid, float factor, int threads) {
  parallel(n, threads, [=](int64_t begin, int64_t end) {
    const Decoder decoder(*grid);
    for (int64_t i = begin; i < end; i += TILE)
      decoder.sum(codes, senders, scales, out + i, i, end - i < TILE ? end - i : TILE, factor);
  });
}

EXPORT int narrowgauge_reduce_encode(const uint8_t* const* codes, int senders, const float* scales,
                                     uint8_t* out, int64_t n, const Grid* grid, float scale_out,
                                     float factor, int threads) {
  int found = 0;
  parallel(n, threads, [&](int64_t begin, int64_t end) {
    const Decoder decoder(*grid);
    const Encoder encoder(*grid, EVEN, 0);
    bool mine = false;
    for (int64_t i = begin; i < end; i += TILE) {
      const int64_t length = end - i < TILE ? end - i : TILE;
      float total[TILE];
      decoder.sum(codes, senders, scales, total, i, length, factor);
      if (grid->bits == 32)
        memcpy(out + 4 * i, total, 4 * length);
      else
        mine |= encoder.packed(total, out, i, length, &scale_out, 0);
    }
    if (mine) __atomic_store_n(&found, 1, __ATOMIC_RELAXED);
  });
  return found;
}

EXPORT void narrowgauge_largest_magnitudes(const float* x, uint32_t* out, int64_t n, int64_t block, int threads) {
  const int64_t size = block ? block : n > 0 ? n : 1;
  memset(out, 0, (block ? (n + block - 1) / block : 1) * 4);
  parallel(n, threads, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end;) {  // a block may reach over the borders of threads
      const int64_t which = i / size, border = (which + 1) * size, stop = border < end ? border : end;
      const uint32_t most = largest_magnitude(x + i, stop - i);
      uint32_t seen = __atomic_load_n(out + which, __ATOMIC_RELAXED);
      while (seen < most && !__atomic_compare_exchange_n(out + which, &seen, most, true, __ATOMIC_RELAXED,
                                                         __ATOMIC_RELAXED)) {
      }
      i = stop;
    }
  });
}
