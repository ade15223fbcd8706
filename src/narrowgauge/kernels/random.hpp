// Random words by counting, so that any thread can make those of any element.
#pragma once

#include "numbers.hpp"

namespace {

// ---- random words: Philox4x32-7, counter (block, 0), four words per block
// --------------------------

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
          const lanes p0 = multiply(x0[s], lanes{} + 0xD2511F53u),
                      p1 = multiply(x2[s], lanes{} + 0xCD9E8D57u);
          x0[s] = (p1 >> 32) ^ x1[s] ^ key0[r];
          x1[s] = p1;
          x2[s] = (p0 >> 32) ^ x3[s] ^ key1[r];
          x3[s] = p0;
        }
      for (int s = 0; s < SIDE; s++) {
        const lanes low = (x0[s] & 0xffffffffu) | x1[s] << 32,
                    high = (x2[s] & 0xffffffffu) | x3[s] << 32;
        const lanes halves[2] = {__builtin_shuffle(low, high, even),
                                 __builtin_shuffle(low, high, odd)};
        memcpy(words + 4 * (block + s * LANES), halves, sizeof halves);
      }
    }
  }
};

}  // namespace
