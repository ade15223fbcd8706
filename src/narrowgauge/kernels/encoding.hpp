// Numbers to codes: rounded, scaled and packed, and the scale that fits them.
#pragma once

#include "halves.hpp"
#include "numbers.hpp"
#include "packing.hpp"
#include "random.hpp"
#include "rounding.hpp"

namespace {

// Encodes runs of elements that share a scale into a tile of codes.
struct Encoder {
  const Grid& grid;
  Rounding rounding;
  Fast fast;
  Philox philox;
#ifdef __F16C__
  Halves halves;
#endif
  const bool fits;  // the caller has made sure that all is finite and nothing overflows
  Encoder(const Grid& g, int r, uint64_t key, bool all_fits = false)
      : grid(g),
        rounding(Rounding(r)),
        fast(g, true),
        philox(key),
#ifdef __F16C__
        halves(g, 0),
#endif
        fits(all_fits) {
  }

  bool spoilt(const float* x, int64_t n) const { return largest_magnitude(x, n) > INF; }
  bool spoilt(const double* x, int64_t n) const {
    bool found = false;
    for (int64_t i = 0; i < n; i++) found |= x[i] != x[i];
    return found;
  }
  template <class Code>
  void run(const float* x, Code* out, int64_t n, float scale, const uint32_t* words) const {
#ifdef __F16C__
    const float multiplier = rounding == EVEN ? halves.encoding(scale) : 0.0f;
    if (multiplier) {
      const auto loop = !fits           ? encode_halves<false, false, Code>
                        : !halves.same ? encode_halves<true, false, Code>
                                       : encode_halves<true, true, Code>;
      return loop(x, out, n, halves, multiplier);
    }
#endif
    const int k = exponent_of(scale);
    // Scaling down may round in float32, which is harmless only if it happens far below the grid.
    const bool exact = k >= 0 || grid.min_exponent - grid.mantissa_bits >= -125;
    if (rounding == EVEN && fast.possible && exact) {
      if (fast.integer)
        encode_integers(x, out, n, fast, scale);
      else if (fast.zero_sign && fast.overflow == fast.infinite)
        k ? encode_fast<true, SIGN_BIT>(x, out, n, fast, scale)
          : encode_fast<false, SIGN_BIT>(x, out, n, fast, scale);
      else
        k ? encode_fast<true, OTHER_SIGN_BIT>(x, out, n, fast, scale)
          : encode_fast<false, OTHER_SIGN_BIT>(x, out, n, fast, scale);
    } else if (k == 0 && General<float>::fits(grid)) {
      round_in(rounding, x, out, n, General<float>(grid, true, 0), words);
    } else {
      double wide[TILE];
      for (int64_t i = 0; i < n; i++) wide[i] = double(x[i]);
      run(wide, out, n, scale, words);
    }
  }
  template <class Code>
  void run(const double* x, Code* out, int64_t n, float scale, const uint32_t* words) const {
    round_in(rounding, x, out, n, General<double>(grid, true, exponent_of(scale)), words);
  }
  // Elements [first, first + n) of a tensor, n <= TILE, as codes; returns whether NaN spoilt them.
  template <class T, class Code>
  bool tile(const T* x, Code* out, int64_t first, int64_t n, const float* scales,
            int64_t block) const {
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
        if (!fits && !grid.has(HAS_NAN)) found |= spoilt(x + i, length);
      }
      i += length;
    }
    return found;
  }
  // The same, packed; `out` begins at element 0, and `first` is a multiple of 8.
  template <class T>
  bool packed(const T* x, uint8_t* out, int64_t first, int64_t n, const float* scales,
              int64_t block) const {
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

// The exponent of the largest power of two that keeps a magnitude finite: scaling.scale_exponent.
struct Fit {
  const Limits limits;
  int operator()(uint32_t magnitude) const {
    const int shift = magnitude < 1u << 23 ? __builtin_clz(magnitude) - 8 : 0;  // subnormal
    const uint32_t normal = magnitude << shift, fraction = normal & 0x7fffffu;
    const int exponent = shift ? -125 - shift : int(normal >> 23) - 126;
    const bool over = fraction > limits.fraction || (limits.inclusive && fraction == limits.fraction);
    const int fitting = limits.exponent - exponent - over;
    return fitting < limits.lowest ? limits.lowest
                                   : fitting > limits.highest ? limits.highest : fitting;
  }
};

}  // namespace
