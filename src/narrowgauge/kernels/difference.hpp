// The difference between two tensors as codes in blocks, in one pass, and its addition to one of them.
#pragma once

#include "numbers.hpp"
#include "rounding.hpp"

// What native.py fills in; kernels/differences.py explains the words.
struct Blocks {
  int32_t size, scaled, top_exponent;
  uint32_t limit;
  float half_step;
};

namespace {

constexpr uint8_t ESCAPED = 255;  // stands in for the scale of a block that travels as float32

NOINLINE void subtract(const float* a, const float* b, float* out, int64_t n) {
  SIMD for (int64_t i = 0; i < n; i++) out[i] = a[i] - b[i];
}

// The exponent of the largest power of two under which `magnitude`, bits of a finite float, still
// rounds to a finite element.
INLINE int fitting_exponent(uint32_t magnitude, const Blocks& blocks) {
  if (magnitude == 0) return 0;
  const int zeros = __builtin_clz(magnitude) - 8;  // of a subnormal number's significand
  const bool subnormal = zeros > 0;
  const uint32_t fraction = (subnormal ? magnitude << zeros : magnitude) & 0x7fffffu;
  const int exponent = (subnormal ? 1 - zeros : int(magnitude >> 23)) - 126;
  const int k = blocks.top_exponent - exponent - (fraction >= blocks.limit);
  return k < -127 ? -127 : k > 127 ? 127 : k;
}

// Codes a block of n <= TILE differences `d` whose largest magnitude has the bits `largest`;
// returns the byte that stands for its scale. `bound`: what rounding may change, at most.
template <class Encoder>
uint8_t encode_block(const Encoder& encoder, const Blocks& blocks, const float* d, uint32_t largest,
                     float bound, uint8_t* codes, int64_t n) {
  if (largest < INF) {
    const int k = blocks.scaled ? fitting_exponent(largest, blocks) : 0;
    const int reach = blocks.scaled ? -k : int(largest >> 23) - 127;
    if (blocks.half_step * float(double_power_of_two(reach)) <= bound) {
      const float scale = float(double_power_of_two(k));
      encoder.packed(d, codes, 0, n, k ? &scale : nullptr, 0);
      return uint8_t(127 - k);
    }
  }
  memset(codes, 0, (n * encoder.grid.bits + 7) / 8);
  return ESCAPED;
}

}  // namespace
