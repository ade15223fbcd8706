// The kernels as machine code: rounding, packing, unpacking and summing numbers in narrow formats.
//
// extern "C" on raw pointers, no Python and no torch, so one build serves every version of both.
// CMake compiles this file once per instruction level and native.py picks one at run time; loops
// are plain and left to the compiler to vectorise. Results equal reference.py bit for bit at every
// level and for every number of threads, which needs -ffp-contract=off and forbids -ffast-math.
//
// If the caller's thread flushes subnormals (torch.set_flush_denormal), float32 subnormals, input
// or output, may count as zero here; every other result is independent of the MXCSR register.

#include "difference.hpp"
#include "encoding.hpp"
#include "halves.hpp"
#include "matmul.hpp"
#include "numbers.hpp"
#include "packing.hpp"
#include "random.hpp"
#include "rounding.hpp"

namespace {

// ---- decoding
// --------------------------------------------------------------------------------------

struct Decoder {
  const float* table;
  uint32_t bits, sign_bit, m, shift, adjust, threshold, largest, infinity_code, lone_nan;
  float subnormal;
  bool integer, prefix;
#ifdef __F16C__
  Halves halves;
#endif
  explicit Decoder(const Grid& g)
      : table(g.table),
        bits(uint32_t(g.bits)),
        sign_bit(1u << (g.bits - 1)),
        m(uint32_t(g.mantissa_bits)),
        shift(23 - m),
        largest(g.largest),
        infinity_code(g.infinity_code),
        // FNUZ: the code of negative zero is NaN. Elsewhere no code equals `lone_nan`.
        lone_nan(!g.has(INTEGER) && g.has(HAS_NAN) && g.nan_code == sign_bit ? sign_bit
                                                                             : 0xffffffffu),
        integer(g.has(INTEGER)),
        prefix(false)
#ifdef __F16C__
        ,
        halves(g, lone_nan)
#endif
  {
    if (table || integer || bits == 32) return;
    adjust = uint32_t(g.min_exponent + 126) << m;
    threshold = g.min_exponent == -126 ? 0 : 1u << m;
    subnormal = threshold ? float(double_power_of_two(g.min_exponent - g.mantissa_bits)) : 0.0f;
    const uint32_t exponents = (sign_bit >> m) - 1;  // the field's largest
    const bool ieee = largest + 1 == infinity_code && infinity_code == exponents << m;
    prefix = exponents == 255 && g.min_exponent == -126 && ieee;
  }

  template <Use USE, class Code>
  static void floats(const Code* codes, float* out, int64_t n, Decoder d, float scale,
                     float factor) {
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
  // bf16 and the like: the first bits of a float32.
  template <Use USE, class Code>
  static void prefixes(const Code* codes, float* out, int64_t n, Decoder d, float scale,
                       float factor) {
    const uint32_t shift_ = 32 - d.bits;
    SIMD for (int64_t i = 0; i < n; i++)
        use<USE>(out + i, float_of(uint32_t(codes[i]) << shift_) * scale, factor);
  }
  template <Use USE, class Code>
  static void integers(const Code* codes, float* out, int64_t n, Decoder d, float scale,
                       float factor) {
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
    else if (prefix)
      prefixes<USE>(codes, out, n, *this, scale, factor);
#ifdef __F16C__
    else if (const float multiplier = halves.decoding(scale))
      (halves.same ? decode_halves<USE, true, Code> : decode_halves<USE, false, Code>)(
          codes, out, n, halves, multiplier, factor);
#endif
    else
      floats<USE>(codes, out, n, *this, scale, factor);
  }
  template <Use USE, class Code>
  void tile(const Code* codes, float* out, int64_t first, int64_t n, const float* scales,
            int64_t block, float factor) const {
    for (int64_t i = 0; i < n;) {
      int64_t length = n - i;
      if (block) {
        const int64_t left = block - (first + i) % block;
        length = length < left ? length : left;
      }
      run<USE>(codes + i, out + i, length, scales ? scales[block ? (first + i) / block : 0] : 1.0f,
               factor);
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
    if (senders == 1) return packed<STORE>(codes[0], out, first, n, scales, 0, factor);
    packed<BEGIN_SUM>(codes[0], out, first, n, scales, 0, 1.0f);
    for (int s = 1; s < senders - 1; s++)
      packed<CONTINUE_SUM>(codes[s], out, first, n, scales + s, 0, 1.0f);
    packed<END_SUM>(codes[senders - 1], out, first, n, scales + senders - 1, 0, factor);
  }
};

}  // namespace

// ---- what native.py calls
// --------------------------------------------------------------------------

EXPORT int narrowgauge_interface() {
  return 4;
}  // native.py refuses a library of another interface

EXPORT int narrowgauge_level() {  // the highest x86-64 level that this processor runs
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
                  __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("f16c");
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
      return (fast.possible_magic ? round_magic : round_fast)(x + begin, out + begin, end - begin,
                                                              fast);
    const bool direct = General<float>::fits(*grid);
    const Philox philox(key);
    uint32_t words[TILE];
    for (int64_t i = begin; i < end; i += TILE) {
      const int64_t length = end - i < TILE ? end - i : TILE;
      if (rounding == STOCHASTIC) philox.tile(words, i);
      if (rounding == STOCHASTIC && fast.possible && fast.possible_stochastic) {
        round_stochastic(x + i, out + i, length, fast, words);
      } else if (direct) {
        round_in(Rounding(rounding), x + i, out + i, length, General<float>(*grid, false, 0),
                 words);
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

EXPORT int narrowgauge_encode_float(const float* x, uint8_t* out, int64_t n, const Grid* grid,
                                    int rounding, uint64_t key, const float* scales, int64_t block,
                                    int threads) {
  return encode(x, out, n, grid, rounding, key, scales, block, threads);
}

EXPORT int narrowgauge_encode_double(const double* x, uint8_t* out, int64_t n, const Grid* grid,
                                     int rounding, uint64_t key, const float* scales, int64_t block,
                                     int threads) {
  return encode(x, out, n, grid, rounding, key, scales, block, threads);
}

constexpr int64_t FITTED = 8 * TILE;    // numbers that stay in the first cache between two looks
constexpr int64_t LINE = 16;            // numbers that memory brings at once
constexpr int64_t STREAMED = 1 << 18;  // numbers that would push all else out of a core's caches

// Codes under the exponent that fits the largest |x|, which is returned as bits; none if that is not
// finite. Numbers are read from memory once if no later one asks for a smaller exponent than the
// first ones do; if one does, all before it are encoded anew, with what fits all that follow.
EXPORT uint32_t narrowgauge_encode_fitting(const float* x, uint8_t* out, int64_t n,
                                           const Grid* grid, const Limits* limits,
                                           int32_t* exponent) {
  // The smallest exponent leaves numbers of up to 4, which may not fit after all.
  const Encoder encoder(*grid, EVEN, 0, grid->largest_value >= 4.0f);
  const Fit fit{*limits};
  uint32_t largest = 0;
  bool known = false;  // whether `largest` is of all, not only of those before
  *exponent = 0;
  for (int64_t i = 0; i < n; i += FITTED) {
    const int64_t end = n - i < FITTED ? n : i + FITTED;
    const uint32_t most = known ? 0 : largest_magnitude(x + i, end - i);
    if (most > largest) {
      const bool none_before = largest == 0;  // zeros have one code, whatever the exponent
      largest = most;
      if (largest < INF && !none_before && fit(largest) != *exponent) {
        const uint32_t rest = largest_magnitude(x + end, n - end);
        largest = rest > largest ? rest : largest;
        known = true;
        i = -FITTED;
      }
      if (largest >= INF) return largest;
      *exponent = fit(largest);
      if (known) continue;
    }
    const float scale = power_of_two(*exponent);
    for (int64_t t = i; t < end; t += TILE) {
      for (int64_t next = t + FITTED; next < t + FITTED + TILE && next < n; next += LINE)
        __builtin_prefetch(x + next, 0, 2);  // while memory has nothing else to do
      encoder.packed(x + t, out, t, end - t < TILE ? end - t : TILE, &scale, 0);
    }
  }
  return largest;
}

EXPORT void narrowgauge_decode(const uint8_t* codes, float* out, int64_t n, const Grid* grid,
                               const float* scales, int64_t block, float factor, int threads) {
  parallel(n, threads, [=](int64_t begin, int64_t end) {
    const Decoder decoder(*grid);
    // Runs end at the borders of blocks; all of them must begin and end where vectors do.
    const bool stream = n >= STREAMED && !(uintptr_t(out) % 32) && block % 16 == 0;
    for (int64_t i = begin; i < end; i += TILE) {
      const int64_t length = end - i < TILE ? end - i : TILE;
      (stream && length == TILE)
          ? decoder.packed<STREAM>(codes, out + i, i, length, scales, block, factor)
          : decoder.packed<STORE>(codes, out + i, i, length, scales, block, factor);
    }
  });
}

EXPORT void narrowgauge_reduce(const uint8_t* const* codes, int senders, const float* scales,
                               float* out, int64_t n, const Grid* grid, float factor, int threads) {
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

EXPORT void narrowgauge_largest_magnitudes(const float* x, uint32_t* out, int64_t n, int64_t block,
                                           int threads) {
  const int64_t size = block ? block : n > 0 ? n : 1;
  const int64_t blocks = block ? (n + block - 1) / block : 1;
  if (blocks) memset(out, 0, blocks * 4);
  parallel(n, threads, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end;) {  // a block may reach over the borders of threads
      const int64_t which = i / size, border = (which + 1) * size,
                    stop = border < end ? border : end;
      const uint32_t most = largest_magnitude(x + i, stop - i);
      uint32_t seen = __atomic_load_n(out + which, __ATOMIC_RELAXED);
      while (seen < most && !__atomic_compare_exchange_n(out + which, &seen, most, true,
                                                         __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
      }
      i = stop;
    }
  });
}

// Codes of `master - replica` in blocks (of `master`, if `replica` is null); returns how many of
// them could not be coded within `tolerance` times their largest |master| (infinity: all that are
// finite can).
EXPORT int64_t narrowgauge_encode_difference(const float* master, const float* replica,
                                             uint8_t* scales, uint8_t* codes, int64_t n,
                                             const Grid* grid, const Blocks* blocks,
                                             float tolerance, int threads) {
  int64_t found = 0;
  parallel(n, threads, [&](int64_t begin, int64_t end) {
    const Encoder encoder(*grid, EVEN, 0);
    const Blocks own = *blocks;
    int64_t mine = 0;
    float d[TILE];
    for (int64_t i = begin; i < end; i += own.size) {
      const int64_t length = end - i < own.size ? end - i : own.size;
      const float* ahead = master + i;
      if (replica) subtract(ahead, replica + i, d, length), ahead = d;
      float bound = float_of(INF);
      if (tolerance < bound) bound = tolerance * float_of(largest_magnitude(master + i, length));
      scales[i / own.size] = encode_block(encoder, own, ahead, largest_magnitude(ahead, length),
                                          bound, codes + i / 8 * grid->bits, length);
      mine += scales[i / own.size] == ESCAPED;
    }
    if (mine) __atomic_fetch_add(&found, mine, __ATOMIC_RELAXED);
  });
  return found;
}

EXPORT void narrowgauge_apply_difference(const uint8_t* scales, const uint8_t* codes,
                                         float* replica, int64_t n, const Grid* grid,
                                         const Blocks* blocks, int threads) {
  parallel(n, threads, [=](int64_t begin, int64_t end) {
    const Decoder decoder(*grid);
    float powers[TILE / 16];  // no block is smaller
    for (int64_t i = begin; i < end; i += TILE) {
      const int64_t length = end - i < TILE ? end - i : TILE;
      const uint8_t* own = scales + i / blocks->size;
      for (int64_t b = 0; b * blocks->size < length; b++)
        powers[b] = own[b] == ESCAPED ? 0.0f : float(double_power_of_two(own[b] - 127));
      decoder.packed<CONTINUE_SUM>(codes + i / 8 * grid->bits, replica + i, 0, length, powers,
                                   blocks->size, 1.0f);
    }
  });
}

// `multiply` null: products are exact.
EXPORT void narrowgauge_matmul(const Product* product, const Grid* multiply, const Grid* accumulate,
                               const float* a, const float* b, float* out, int threads) {
  matmul(*product, multiply, *accumulate, a, b, out, threads);
}
