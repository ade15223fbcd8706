// Products of matrices, rounded to nearest-even as they are made: the fast cases, in register
// tiles.
//
// Why float32 or float64 arithmetic followed by rounding may stand for exact arithmetic followed by
// rounding, with P bits of significand (24 or 53) in the machine and p in the format:
//
// - A product of significands of i and j bits has i + j bits: exact if i + j <= P and its last bit
//   and its magnitude stay within the exponents. In float64 that holds for any two float32.
// - A sum of a number of the format and one of q <= p bits is rounded twice, and harmlessly so if
//   p + q <= P - 2. Let x be the larger, 2**e <= |x| < 2**(e + 1), and y the smaller. If the
//   machine's sum is inexact, the last bit of y lies P or more places below the first bit of the
//   sum, so |y| < 2**(e + q - P). Then x lies on the format's grid (were it finer, among the
//   subnormals, y would be a number of the format and the sum, of q + 1 bits, exact), where the
//   nearest middle between two numbers is at least 2**(e - p - 1) away. That is more than |y| and
//   the machine's error, 2**(e - P), together: its rounding cannot reach a middle.
//   float32: p, q <= 11, or mantissas of 10 bits; float64: p, q <= 24, always.
//   With q > p this fails, since x itself may be a middle. Then `to_odd` is used.
// - A sum whose terms are all multiples of 2**L and whose partial sums stay below 2**(L + 53) is
//   exact in float64, in any order. `Range` measures that in the operands.
#pragma once

#include "sums.hpp"

namespace {

// ---- rounding of vectors: see round_magic and round_fast for the ideas
// --------------------------

template <class T, bool CALM = false>  // calm: nothing overflows and there is no infinity
struct Magic {
  typedef typename Vector<T>::V V;
  typedef typename Vector<T>::U U;
  typedef typename Vector<T>::S S;
  static constexpr typename Vector<T>::Bits SIGN = typename Vector<T>::Bits(1)
                                                   << (sizeof(T) * 8 - 1);
  V least, cap, top;
  U overflow, add;
  explicit Magic(const Grid& g) {
    typedef typename Vector<T>::Bits Bits;
    constexpr int M = Vector<T>::MANTISSA, BIAS = Vector<T>::BIAS;
    const int m = g.mantissa_bits, emax = exponent_of(g.largest_value);
    const int room = BIAS - 1 - M + m;  // float: 103 + m
    least = V{} + float_of(Bits(g.min_exponent + BIAS) << M);
    cap = V{} + float_of(Bits((emax + 1 < room ? emax + 1 : room) + BIAS) << M);
    top = V{} + T(g.largest_value);
    overflow = U{} + bits_of(T(g.overflow_value));
    add = U{} + (Bits(M - m) << M | Bits(1) << (M - 1));
  }
  INLINE V operator()(V x) const { return rounded<CALM>(x); }
  template <bool CALMLY>
  INLINE V rounded(V x) const {
    constexpr int M = Vector<T>::MANTISSA;
    const U u = (U)x, sign = U{} + SIGN;
    V e = (V)(u & (typename Vector<T>::Bits(2 * Vector<T>::BIAS + 1) << M));
    e = e < least ? least : e;
    if constexpr (!CALMLY) e = e > cap ? cap : e;
    const V c = (V)((U)e + add);
    const U y = (U)((x + c) - c) & ~sign;
    U r = y;
    if constexpr (!CALMLY) r = (V)y > top ? overflow : y;  // false for NaN
    return (V)(r | (u & sign));
  }
};

// Where overflow gives infinity, Kahan's compensation needs no such check at each step: a
// difference of two numbers of the format is at most twice the largest, which `rounded` bears, and
// whatever is beyond the largest number, infinite or NaN makes the compensation 0 in the end.
template <class T>
struct Infinite : Magic<T> {
  typedef typename Vector<T>::V V;
  typedef typename Vector<T>::U U;
  using Magic<T>::Magic;
  INLINE V lost(V t, V sum, V y) const {
    const V change = this->template rounded<true>(t - sum);
    const V again = this->template rounded<true>(change - y);
    const U sign = U{} + Magic<T>::SIGN;
    const V first = (V)((U)change & ~sign), second = (V)((U)again & ~sign);
    return (V)((U)again & (U)(first <= this->top) & (U)(second <= this->top));
  }
};

template <class T>
using Calm = Magic<T, true>;

template <class T>
struct Integer {
  typedef typename Vector<T>::V V;
  typedef typename Vector<T>::U U;
  typedef typename Vector<T>::S S;
  typedef typename Vector<T>::Bits Bits;
  U adjust, half, mask, overflow;
  S threshold, top;
  V magic;
  int shift;
  explicit Integer(const Grid& g) {
    constexpr int M = Vector<T>::MANTISSA, BIAS = Vector<T>::BIAS;
    shift = M - g.mantissa_bits;
    adjust = U{} + (Bits(g.min_exponent + BIAS - 1) << M);
    half = U{} + ((Bits(1) << (shift - 1)) - 1);
    mask = U{} + ~((Bits(1) << shift) - 1);
    overflow = U{} + bits_of(T(g.overflow_value));
    const Bits normal = Bits(g.min_exponent + BIAS) << M;
    threshold = (S)(U{} + (g.min_exponent + BIAS == 1 ? Bits(0) : normal));
    top = (S)(U{} + bits_of(T(g.largest_value)));
    magic = V{} + float_of(Bits(g.min_exponent + shift + BIAS) << M);
  }
  INLINE V operator()(V x) const {
    constexpr int M = Vector<T>::MANTISSA;
    const U u = (U)x, sign = U{} + (Bits(1) << (sizeof(T) * 8 - 1)), a = u & ~sign;
    const S infinity = (S)(U{} + (Bits(2 * Vector<T>::BIAS + 1) << M));
    const U t = a - adjust;
    const U normal = ((t + ((t >> shift) & 1) + half) & mask) + adjust;
    const U small = (U)(((V)a + magic) - magic);
    U r = (S)a < threshold ? small : normal;
    r = (S)r > top ? overflow : r;
    r = (S)a > infinity ? a : r;
    return (V)(r | (u & sign));
  }
};

template <class T>
struct Exact {  // no rounding but the machine's: float32 itself, or exact products
  explicit Exact(const Grid&) {}
  INLINE typename Vector<T>::V operator()(typename Vector<T>::V x) const { return x; }
};

// ---- tiles
// --------------------------------------------------------------------------------------

enum Sums { PLAIN, ODD, CHUNKS };  // a product at a time; the same, to odd; exact sums of chunks

template <Sums SUMS, class V>
INLINE V add(V x, V y) {
  if constexpr (SUMS == ODD)
    return odd_sum(x, y);
  else
    return x + y;
}

// Kahan's c, or 0 if it is not finite: after an infinity it stays 0.
template <class Round, class V>
INLINE V compensation(const Round& round, V t, V sum, V y) {
  const V again = round(round(t - sum) - y);
  typedef decltype(again - again == 0) Mask;
  return (V)((Mask)again & (again - again == 0));
}
template <class T>
INLINE typename Vector<T>::V compensation(const Infinite<T>& round, typename Vector<T>::V t,
                                          typename Vector<T>::V sum, typename Vector<T>::V y) {
  return round.lost(t, sum, y);
}

// a: R rows, [depth][R]; b: C vectors of columns, [depth][C * LANES]; out: [R][C * LANES].
template <class T, class ByProduct, class BySum, Sums SUMS, bool KAHAN, int R, int C>
NOINLINE void tile(const T* a, const T* b, T* out, int64_t depth, int64_t chunk,
                   const ByProduct& by_product, const BySum& by_sum) {
  typedef typename Vector<T>::V V;
  constexpr int LANES = VECTOR / sizeof(T);
  const ByProduct product = by_product;
  const BySum round = by_sum;
  V sum[R][C], lost[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) sum[r][c] = V{}, lost[r][c] = V{};
  int64_t left = chunk;
  for (int64_t k = 0; k < depth; k++) {
    const bool last = SUMS != CHUNKS || --left == 0 || k + 1 == depth;
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
      V column;
      memcpy(&column, b + k * C * LANES + c * LANES, sizeof column);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const V p = product(column * a[k * R + r]);
        if constexpr (KAHAN) {
          const V y = round(add<SUMS>(p, -lost[r][c]));
          const V t = round(sum[r][c] + y);
          lost[r][c] = compensation(round, t, sum[r][c], y);
          sum[r][c] = t;
        } else if constexpr (SUMS == CHUNKS) {
          sum[r][c] += p;
        } else {
          sum[r][c] = round(add<SUMS>(sum[r][c], p));
        }
      }
    }
    if (SUMS == CHUNKS && last) {
      for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) sum[r][c] = round(sum[r][c]);
      left = chunk;
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) memcpy(out + (r * C + c) * LANES, &sum[r][c], sizeof(V));
}

}  // namespace
