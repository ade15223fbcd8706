// Codes of 1 to 15 bits in a little-endian stream of bits.
#pragma once

#include "numbers.hpp"

namespace {

// ---- packing: groups of 8 elements are exactly `bits` bytes
// ----------------------------------------

template <int BITS>
INLINE uint64_t gather_bits(uint64_t codes, [[maybe_unused]] uint64_t lane_mask,
                            [[maybe_unused]] int lane) {
#ifdef __BMI2__
  return _pext_u64(codes, lane_mask);
#else
  uint64_t word = 0;
  for (int i = 0; i < 64 / lane; i++)
    word |= (codes >> (i * lane) & ((1ull << BITS) - 1)) << (i * BITS);
  return word;
#endif
}

template <int BITS>
INLINE uint64_t spread_bits(uint64_t word, [[maybe_unused]] uint64_t lane_mask,
                            [[maybe_unused]] int lane) {
#ifdef __BMI2__
  return _pdep_u64(word, lane_mask);
#else
  uint64_t codes = 0;
  for (int i = 0; i < 64 / lane; i++)
    codes |= (word >> (i * BITS) & ((1ull << BITS) - 1)) << (i * lane);
  return codes;
#endif
}

template <int BITS>
struct Packing {
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
  for (; n >= 8 && n * BITS >= 64; n -= 8, codes += 8, in += BITS)
    Packing<BITS>::unpack_group(in, codes);
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
#define PACK(B) \
  case B:       \
    return pack<B>(codes, out, n);
#define UNPACK(B) \
  case B:         \
    return unpack<B>(in, codes, n);
void pack(int bits, const uint8_t* codes, uint8_t* out, int64_t n) {
  switch (bits) { EACH_NARROW(PACK) }
}
void pack(int bits, const uint16_t* codes, uint8_t* out, int64_t n) {
  switch (bits) { EACH_WIDE(PACK) }
}
void unpack(int bits, const uint8_t* in, uint8_t* codes, int64_t n) {
  switch (bits) { EACH_NARROW(UNPACK) }
}
void unpack(int bits, const uint8_t* in, uint16_t* codes, int64_t n) {
  switch (bits) { EACH_WIDE(UNPACK) }
}

}  // namespace
