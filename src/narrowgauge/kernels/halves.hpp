// Formats whose numbers half precision holds, coded by way of it: processors with F16C convert
// between half and single precision themselves, subnormal numbers included. 16 numbers at a time.
#pragma once

#include "rounding.hpp"

namespace {

// What becomes of a decoded, scaled value. STREAM: stored past the caches, if it is in a vector,
// which then must be aligned.
enum Use { STORE, STREAM, BEGIN_SUM, CONTINUE_SUM, END_SUM };

template <Use USE, class T>  // T: float, or a vector of it
INLINE void use(float* out, T value, float factor) {
  if constexpr (USE == CONTINUE_SUM || USE == END_SUM) {
    T sum;
    memcpy(&sum, out, sizeof(T));
    value = sum + value;
  }
  if constexpr (USE == STORE || USE == STREAM || USE == END_SUM) {
    value *= factor;
    value = value == value ? value : T() + float_of(NOT_A_NUMBER);
  }
#ifdef __F16C__
  if constexpr (USE == STREAM && sizeof(T) == 32) return _mm256_stream_ps(out, (__m256)value);
#endif
  memcpy(out, &value, sizeof(T));  // a vector may lie anywhere
}

#ifdef __F16C__
typedef float Floats __attribute__((vector_size(32)));

struct Halves {
  int16_t magnitude, largest, infinity, lone_nan, overflow, nan;
  int m, bits;
  float unit;     // the format's numbers are those of half precision times this; 0: they are not
  bool same;      // ... and its codes the first bits of half precision's
  bool encodes;   // nothing but the case of encode_halves
  Halves(const Grid& g, uint32_t lone_nan_)
      : magnitude(int16_t((1u << (g.bits - 1)) - 1)),
        largest(int16_t(g.largest)),
        infinity(int16_t(g.infinity_code)),
        lone_nan(int16_t(lone_nan_)),
        overflow(int16_t(g.overflow_code)),
        nan(int16_t(g.nan_code)),
        m(g.mantissa_bits),
        bits(g.bits),
        unit(0.0f),
        same(false),
        encodes(false) {
    if (g.table || g.has(INTEGER) || bits > 16 || m > 10) return;
    const uint32_t exponents = (1u << (bits - 1 - m)) - 1;  // the field's largest
    const bool ieee = g.largest + 1 == g.infinity_code && g.infinity_code == exponents << m;
    const int power = g.min_exponent + 14;  // half precision begins at 2**-14
    if ((exponents > 30 && !(exponents == 31 && ieee)) || power < -63 || power > 63) return;
    unit = power_of_two(power);
    same = exponents == 31;
    encodes = g.has(SUBNORMALS) && g.has(SIGNED) && g.has(NEGATIVE_ZERO) && m > 0 &&
              g.overflow_code == g.infinite_code;
  }

  // The power of two between half precision's numbers and the format's, scaled: 0 if not exact.
  float decoding(float scale) const {
    return is_normal(scale) && is_normal(scale * unit) ? scale * unit : 0.0f;
  }
  float encoding(float scale) const {
    return encodes && is_normal(scale) && is_normal(scale / unit) ? scale / unit : 0.0f;
  }
};

INLINE __m256i load16(const uint8_t* codes) {
  return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)codes));
}
template <class Code>
INLINE __m256i load16(const Code* codes) {
  return _mm256_loadu_si256((const __m256i*)codes);
}
INLINE void store16(__m256i codes, uint8_t* out) {
  const __m128i low = _mm256_castsi256_si128(codes), high = _mm256_extracti128_si256(codes, 1);
  _mm_storeu_si128((__m128i*)out, _mm_packus_epi16(low, high));
}
template <class Code>
INLINE void store16(__m256i codes, Code* out) {
  _mm256_storeu_si256((__m256i*)out, codes);
}

template <Use USE, bool SAME, class Code>
NOINLINE void decode_halves(const Code* codes, float* out, int64_t n, const Halves& halves,
                            float multiplier, float factor) {
  const Halves h = halves;
  const __m128i shift = _mm_cvtsi32_si128(10 - h.m), sign_shift = _mm_cvtsi32_si128(16 - h.bits);
  const __m256i magnitude = _mm256_set1_epi16(h.magnitude), largest = _mm256_set1_epi16(h.largest);
  const __m256i infinity = _mm256_set1_epi16(h.infinity), lone = _mm256_set1_epi16(h.lone_nan);
  const __m256i infinite = _mm256_set1_epi16(0x7c00), quiet = _mm256_set1_epi16(0x0200);
  const auto widened = [&](__m256i c, float* to) __attribute__((always_inline)) {
    __m256i half;
    if constexpr (SAME) {
      half = _mm256_sll_epi16(c, sign_shift);
    } else {
      const __m256i a = _mm256_and_si256(c, magnitude);
      const __m256i special = _mm256_cmpgt_epi16(a, largest), alone = _mm256_cmpeq_epi16(c, lone);
      const __m256i is_nan = _mm256_or_si256(
          _mm256_andnot_si256(_mm256_cmpeq_epi16(a, infinity), special), alone);
      half = _mm256_blendv_epi8(_mm256_sll_epi16(a, shift), infinite,
                                _mm256_or_si256(special, alone));
      half = _mm256_or_si256(half, _mm256_and_si256(is_nan, quiet));
      half = _mm256_or_si256(half, _mm256_sll_epi16(_mm256_xor_si256(c, a), sign_shift));
    }
    use<USE>(to, (Floats)_mm256_cvtph_ps(_mm256_castsi256_si128(half)) * multiplier, factor);
    use<USE>(to + 8, (Floats)_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)) * multiplier,
             factor);
  };
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) widened(load16(codes + i), out + i);
  if (i < n) {
    Code last[16] = {};
    alignas(32) float values[16] = {};
    memcpy(last, codes + i, (n - i) * sizeof(Code));
    memcpy(values, out + i, (n - i) * sizeof(float));
    widened(load16(last), values);
    memcpy(out + i, values, (n - i) * sizeof(float));
  }
}

// Rounded to nearest-even as round_magic does, and then converted, which is exact. Numbers that
// overflow are coded as infinity is, so that a scaled number may as well become infinite. FITS: all
// numbers are finite and none overflows, so nobody needs to look; SAME: as in Halves.
template <bool FITS, bool SAME, class Code>
NOINLINE void encode_halves(const float* x, Code* out, int64_t n, const Halves& halves,
                            float multiplier) {
  const Halves h = halves;
  const __m128i shift = _mm_cvtsi32_si128(10 - h.m), sign_shift = _mm_cvtsi32_si128(16 - h.bits);
  const __m256 times = _mm256_set1_ps(multiplier), sign = _mm256_set1_ps(-0.0f);
  const __m256i field = _mm256_set1_epi32(int32_t(INF));
  const __m256i lowest = _mm256_set1_epi32((127 - 14) << 23);
  const __m256i highest = _mm256_set1_epi32((127 + 16) << 23);
  const __m256i add = _mm256_set1_epi32((23 - h.m) << 23 | 0x400000);
  const __m256i magnitude = _mm256_set1_epi16(0x7fff), infinite = _mm256_set1_epi16(0x7c00);
  const __m256i largest = _mm256_set1_epi16(h.largest), overflow = _mm256_set1_epi16(h.overflow);
  const __m256i nan = _mm256_set1_epi16(h.nan);
  const auto half = [&](const float* from) __attribute__((always_inline)) {
    const __m256 y = _mm256_mul_ps(_mm256_loadu_ps(from), times);
    __m256i e = _mm256_and_si256(_mm256_castps_si256(y), field);
    e = _mm256_max_epi32(e, lowest);
    if constexpr (!FITS) e = _mm256_min_epi32(e, highest);
    const __m256 c = _mm256_castsi256_ps(_mm256_add_epi32(e, add));
    const __m256 r = _mm256_sub_ps(_mm256_add_ps(y, c), c);
    return _mm256_cvtps_ph(_mm256_or_ps(r, _mm256_and_ps(y, sign)), _MM_FROUND_TO_NEAREST_INT);
  };
  const auto codes = [&](const float* from) __attribute__((always_inline)) {
    const __m256i v =
        _mm256_inserti128_si256(_mm256_castsi128_si256(half(from)), half(from + 8), 1);
    if constexpr (FITS && SAME) return _mm256_srl_epi16(v, shift);
    const __m256i a = _mm256_and_si256(v, magnitude);
    __m256i r = _mm256_srl_epi16(a, shift);
    if constexpr (!FITS) r = _mm256_blendv_epi8(r, overflow, _mm256_cmpgt_epi16(r, largest));
    r = _mm256_or_si256(r, _mm256_srl_epi16(_mm256_xor_si256(v, a), sign_shift));
    if constexpr (FITS) return r;
    return _mm256_blendv_epi8(r, nan, _mm256_cmpgt_epi16(a, infinite));
  };
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) store16(codes(x + i), out + i);
  if (i < n) {
    float last[16] = {};
    Code coded[16];
    memcpy(last, x + i, (n - i) * sizeof(float));
    store16(codes(last), coded);
    memcpy(out + i, coded, (n - i) * sizeof(Code));
  }
}
#endif

}  // namespace
