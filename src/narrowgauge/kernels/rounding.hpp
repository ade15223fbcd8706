// Rounding: one element by the general rule, and loops for the common cases.
#pragma once

#include "numbers.hpp"

namespace {

// ---- rounding in general: any mode, any grid, on the bits as integers
// -------------------------------

template <class T>
struct Type;
template <>
struct Type<float> {
  typedef uint32_t U;
  typedef int32_t S;
  static constexpr int MANTISSA = 23, BIAS = 127, CAP = 31;
};
template <>
struct Type<double> {
  typedef uint64_t U;
  typedef int64_t S;
  static constexpr int MANTISSA = 52, BIAS = 1023, CAP = 62;
};

// The grid in the words of float or double: `code` says whether results are codes or values. Every
// field is as wide as an element, and flags are masks, so that the loop below vectorises.
template <class T>
struct General {
  typedef typename Type<T>::U U;
  typedef typename Type<T>::S S;
  S m, emin, wider, exponent;
  U parity, unit, least, largest, top, overflow, infinite, nan;
  U sign, result_sign, negative_zero, integer, bits_mask, adjust, threshold, care, limit;
  T subnormal;
  // Whether the words are wide enough. In float a subnormal number seems to have exponent -126, so
  // where the grid's own subnormals lie there, it must have some.
  static bool fits(const Grid& g) {
    const bool same_below = g.has(SUBNORMALS) || g.mantissa_bits == 0;
    return sizeof(T) == 8 || g.min_exponent > -126 || (g.min_exponent == -126 && same_below);
  }
  General(const Grid& g, bool code, int exponent_)
      : m(g.mantissa_bits),
        emin(g.min_exponent),
        wider(g.has(SUBNORMALS) ? 0 : g.mantissa_bits),
        exponent(exponent_),
        unit(U(1) << g.mantissa_bits),
        largest(g.largest) {
    parity = least = g.has(SIGNED) ? 0 : 1;  // without zero, codes are ordinals less one
    sign = U(1) << (sizeof(T) * 8 - 1);
    result_sign = code ? (g.has(SIGNED) ? U(1) << (g.bits - 1) : U(0)) : sign;
    negative_zero = g.has(NEGATIVE_ZERO);
    integer = g.has(INTEGER) ? ~U(0) : U(0);
    bits_mask = ~U(0) >> (sizeof(U) * 8 - g.bits);
    adjust = U(S(emin + Type<T>::BIAS - 1)) << Type<T>::MANTISSA;
    // In float `fits` holds; at emin == -126 `adjust` is 0 and ordinals below and above the smallest
    // normal number are shifted bits alike.
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
    const U with_sign =
        (result | g.negative_zero) != 0 ? result | (negative & g.result_sign) : result;
    result = (negated & g.integer) | (with_sign & ~g.integer);
  } else {
    const U with_sign = result | (negative & g.result_sign);
    result = result > infinity ? g.nan : (result | g.negative_zero) != 0 ? with_sign : result;
  }
  // NaN, and without a sign also zero and everything negative.
  return (u & g.care) - g.least > g.limit ? g.nan : result;
}

template <Rounding R, class T, class Out>  // Out: T for values, an integer for codes
NOINLINE void round_general(const T* x, Out* out, int64_t n, const General<T>& grid,
                            const uint32_t* words) {
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
void round_in(Rounding r, const T* x, Out* out, int64_t n, const General<T>& g,
              const uint32_t* words) {
  switch (r) {
    case EVEN:
      return round_general<EVEN>(x, out, n, g, words);
    case AWAY:
      return round_general<AWAY>(x, out, n, g, words);
    case ZERO:
      return round_general<ZERO>(x, out, n, g, words);
    case UP:
      return round_general<UP>(x, out, n, g, words);
    case DOWN:
      return round_general<DOWN>(x, out, n, g, words);
    case STOCHASTIC:
      return round_general<STOCHASTIC>(x, out, n, g, words);
  }
}

uint32_t largest_magnitude(const float* x, int64_t n) {
  constexpr int WIDTH = 64;  // several vectors side by side, so that none waits for another
  int32_t most[WIDTH] = {}, all = 0;
  for (; n >= WIDTH; n -= WIDTH, x += WIDTH) SIMD for (int i = 0; i < WIDTH; i++) {
      const int32_t a = int32_t(bits_of(x[i]) & MAGNITUDE);
      most[i] = a > most[i] ? a : most[i];
    }
  for (int64_t i = 0; i < n; i++)
    most[i] =
        int32_t(bits_of(x[i]) & MAGNITUDE) > most[i] ? int32_t(bits_of(x[i]) & MAGNITUDE) : most[i];
  for (int32_t each : most) all = each > all ? each : all;
  return uint32_t(all);
}

// ---- rounding to nearest-even, float32: the common case at the speed of memory
// ---------------------

struct Fast {
  // Above `threshold` (the smallest normal number) ordinals are the bits less `adjust`, shifted;
  // below it, adding and subtracting `magic` rounds to a multiple of the spacing.
  uint32_t adjust, half, threshold, top, overflow, infinite, nan, largest, mask, zero_sign;
  uint32_t min_bits, cap_bits, add_bits;  // for values: see round_magic
  int shift, sign_shift;
  float magic;
  bool possible, possible_magic, possible_stochastic, integer;
  Fast(const Grid& g, bool code)
      : largest(g.largest),
        zero_sign(g.has(NEGATIVE_ZERO)),
        shift(23 - g.mantissa_bits),
        sign_shift(32 - g.bits),
        integer(g.has(INTEGER)) {
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
    possible_magic = !code && m > 0 && emax <= 103 + m && overflow == infinite &&
                     overflow != NOT_A_NUMBER && zero_sign;
    possible_stochastic = emin - m >= -94;
    min_bits = uint32_t(emin + 127) << 23;
    cap_bits = uint32_t(cap + 127) << 23;
    add_bits = (uint32_t(shift) << 23) | 0x400000u;
  }
};

// (x + c) - c with c = 1.5 * 2**(e + 23 - m) rounds x to m bits, normal or not: the shortest
// kernel, for formats whose exponents leave room for c, whose ties are even in value as in code (m
// > 0), and that treat overflow and infinity alike.
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
NOINLINE void round_stochastic(const float* x, float* out, int64_t n, const Fast& fast,
                               const uint32_t* words) {
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

// How codes tell signs: SIGN_BIT is the common case, where zero has a sign as well and infinity is
// coded as what overflows.
enum Signs { SIGN_BIT, OTHER_SIGN_BIT };

template <bool SCALED, Signs SIGNS, class Code>
NOINLINE void encode_fast(const float* x, Code* out, int64_t n, const Fast& fast, float scale) {
  const Fast f = fast;
  const uint32_t magic = bits_of(f.magic), sign_bit = 0x80000000u >> f.sign_shift;
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
    if constexpr (SIGNS != SIGN_BIT) r = a == INF ? f.infinite : r;
    r |= SIGNS == SIGN_BIT || (r | f.zero_sign) ? u >> f.sign_shift & sign_bit : 0;
    out[i] = Code(int32_t(a) > int32_t(INF) ? f.nan : r);
  }
}

// Integers, of at most 16 bits, which all saturate: adding `magic` leaves an integer in the last bits, in
// two's complement.
template <class Code>
NOINLINE void encode_integers(const float* x, Code* out, int64_t n, const Fast& fast, float scale) {
  const uint32_t bits_mask = 0xffffffffu >> fast.sign_shift, nan = fast.nan;
  const float limit = float(int32_t(fast.largest)), magic = 12582912.0f;  // 1.5 * 2**23
  SIMD for (int64_t i = 0; i < n; i++) {
    float v = x[i] * scale;
    v = v > limit ? limit : v;
    v = v < -limit ? -limit : v;
    const uint32_t r = bits_of(v + magic) & bits_mask;
    out[i] = Code(x[i] == x[i] ? r : nan);
  }
}

}  // namespace
