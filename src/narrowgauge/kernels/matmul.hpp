// Products of matrices in narrow formats: which way is both exact and fast, and the general way.
#pragma once

#include <memory>
#include <vector>

#include "random.hpp"
#include "rounding.hpp"
#include "tiles.hpp"

// What native.py fills in: out[i][m][n] = sum over k of a[i][m][k] * b[i][k][n], k ascending.
struct Product {
  int64_t batch, rows, depth, columns;
  int64_t a_strides[3], b_strides[3];  // in elements: batch (0: the same for all), row, column
  int64_t chunk;                       // products summed exactly before each rounding, 1 to depth
  int32_t compensated, rounding;
  uint64_t key;
};

namespace {

// ---- what the operands hold
// ---------------------------------------------------------------------

struct Range {
  // Every finite number that is not zero is a multiple of 2**low below 2**high, and its significand
  // has at most `bits` bits.
  int low = 0, high = 0, bits = 1;
  bool special = false;  // an infinity or NaN is among them
  Range(const float* x, int64_t batch, int64_t rows, int64_t columns, const int64_t* strides) {
    int64_t row = strides[1], step = strides[2];
    if (row == 1 && step != 1) {
      int64_t other = rows;
      rows = columns, columns = other, row = step, step = 1;
    }
    if (strides[0] == 0 && batch > 0) batch = 1;
    Seen seen;
    for (int64_t i = 0; i < batch; i++)
      for (int64_t r = 0; r < rows; r++) scan(x + i * strides[0] + r * row, columns, step, seen);
    special = seen.special;
    if (seen.most == 0) return;
    const int field = seen.least >> 23;
    const int zeros = seen.mantissas ? __builtin_ctz(seen.mantissas) : 23;
    bits = 24 - zeros;
    low = (field ? field : 1) - 127 - 23 + zeros;
    high = (seen.most >> 23) - 126;
  }

 private:
  struct Seen {  // bits of magnitudes of finite numbers that are not zero
    int32_t least = int32_t(INF), most = 0, mantissas = 0, special = 0;
  };
  static NOINLINE void scan(const float* x, int64_t n, int64_t step, Seen& seen) {
    int32_t least = seen.least, most = seen.most, mantissas = 0, special = 0;
#pragma omp simd reduction(min : least) reduction(max : most) reduction(| : mantissas, special)
    for (int64_t i = 0; i < n; i++) {
      const int32_t a = int32_t(bits_of(x[i * step]) & MAGNITUDE), infinity = int32_t(INF);
      const int32_t finite = a < infinity ? a : 0, nonzero = finite ? finite : infinity;
      special |= a >= infinity;
      least = nonzero < least ? nonzero : least;
      most = finite > most ? finite : most;
      mantissas |= finite & 0x7fffff;
    }
    seen.least = least, seen.most = most;
    seen.mantissas |= mantissas, seen.special |= special;
  }
};

// ---- panels
// -------------------------------------------------------------------------------------

// Cuts the result into tiles of R rows and L columns and calls body(a, b, out, index, columns) for
// each, with a: [depth][R] and b: [depth][L], filled up with zeros, and out: [R][L]. `index` counts
// tiles, row by row of the whole batch; `columns` are those that are wanted.
template <class T, int R, int L, class Body>
void over_tiles(const Product& p, const float* a, const float* b, float* result, int threads,
                const Body& body) {
  const int64_t panels = (p.columns + L - 1) / L, pieces = (p.rows + R - 1) / R;
  const int64_t items = p.batch * panels * pieces;
  // Threads take pieces of work as they come, since a processor may be busy with something else.
  const int64_t share = items / (8 * threads) > 1 ? items / (8 * threads) : 1;
  int64_t next = 0;
  auto work = [&] {
    std::unique_ptr<T[]> memory(new T[p.depth * (R + L) + R * L]);
    T *left = memory.get(), *right = left + p.depth * R, *out = right + p.depth * L;
    int64_t packed = -1, end = 0;
    for (int64_t item = 0;; item++) {
      if (item == end) {
        item = __atomic_fetch_add(&next, share, __ATOMIC_RELAXED);
        if (item >= items) return;
        end = item + share < items ? item + share : items;
      }
      const int64_t i = item / pieces / panels, panel = item / pieces % panels;
      const int64_t m = item % pieces * R, n = panel * L;
      const int64_t rows = p.rows - m < R ? p.rows - m : R;
      const int64_t columns = p.columns - n < L ? p.columns - n : L;
      if (packed != item / pieces) {
        packed = item / pieces;
        const float* from = b + i * p.b_strides[0] + n * p.b_strides[2];
        for (int64_t k = 0; k < p.depth; k++)
          for (int64_t c = 0; c < L; c++)
            right[k * L + c] =
                c < columns ? T(from[k * p.b_strides[1] + c * p.b_strides[2]]) : T(0);
      }
      const float* from = a + i * p.a_strides[0] + m * p.a_strides[1];
      for (int r = 0; r < R; r++)
        for (int64_t k = 0; k < p.depth; k++)
          left[k * R + r] = r < rows ? T(from[r * p.a_strides[1] + k * p.a_strides[2]]) : T(0);
      body(left, right, out, (i * p.rows + m) * panels + panel, columns);
      for (int64_t r = 0; r < rows; r++) {
        float* to = result + (i * p.rows + m + r) * p.columns + n;
        for (int64_t c = 0; c < columns; c++) {
          const float value = float(out[r * L + c]);
          to[c] = value == value ? value : float_of(NOT_A_NUMBER);
        }
      }
    }
  };
#ifdef _OPENMP
  if (threads > 1 && items > 1) {
#pragma omp parallel num_threads(threads)
    work();
    return;
  }
#endif
  work();
}

// ---- the general way: any grid, any rounding, any chunk
// -----------------------------------------

// Random words in the order of use: each rounding of a row of WIDTH sums takes as many.
constexpr int WIDTH = 256;
struct Words {
  Philox philox;
  int64_t next;
  bool wanted;
  uint32_t words[TILE];
  Words(const Product& p, int64_t first)
      : philox(p.key), next(first), wanted(p.rounding == STOCHASTIC) {}
  const uint32_t* take() {
    if (!wanted) return words;
    const int64_t offset = next % TILE;
    if (offset == 0 || fresh) philox.tile(words, next - offset), fresh = false;
    next += WIDTH;
    return words + offset;
  }

 private:
  bool fresh = true;
};

NOINLINE void multiply_row(const double* b, double a, double* out, int64_t n) {
  SIMD for (int64_t j = 0; j < n; j++) out[j] = a * b[j];
}

// high + low += x exactly, but for `rest`; returns whether any rest is not zero.
NOINLINE bool add_row(const double* x, double* high, double* low, double* rest, int64_t n) {
  int any = 0;
#pragma omp simd reduction(| : any)
  for (int64_t j = 0; j < n; j++) {
    double first, second;
    high[j] = two_sum(high[j], x[j], first);
    low[j] = two_sum(low[j], first, second);
    rest[j] = second;
    any |= (second < 0) | (second > 0);  // not NaN, which stands beside a sum that is not finite
  }
  return any;
}

NOINLINE void finish_row(const double* high, const double* low, double* out, int64_t n) {
  SIMD for (int64_t j = 0; j < n; j++) {
    // The sign of an exact zero is that of `high`, and so is what is not finite.
    const double sum = odd_sum(high[j], low[j]);
    out[j] = low[j] == 0 || high[j] - high[j] != 0 ? high[j] : sum;
  }
}

NOINLINE void odd_row(const double* x, const double* y, double sign, double* out, int64_t n) {
  SIMD for (int64_t j = 0; j < n; j++) out[j] = odd_sum(x[j], sign * y[j]);
}

// One row of at most WIDTH sums, after the definition.
struct Row {
  double sum[WIDTH], lost[WIDTH], x[WIDTH], y[WIDTH], high[WIDTH], low[WIDTH], rest[WIDTH];
  bool spilt[WIDTH];
  std::vector<Total> totals;

  void make(const Product& p, const double* a, const double* b, const General<double>* by_product,
            const General<double>& by_sum, Words& words, double* out, int64_t n) {
    const Rounding rounding = Rounding(p.rounding);
    auto round = [&](double* values, const General<double>& g) {
      round_in(rounding, values, values, n, g, words.take());
    };
    for (int64_t j = 0; j < n; j++) sum[j] = lost[j] = 0;
    for (int64_t k = 0; k < p.depth; k += p.chunk) {
      for (int64_t j = 0; j < n; j++) high[j] = p.compensated ? -lost[j] : sum[j], low[j] = 0;
      bool any = false;
      for (int64_t i = k; i < k + p.chunk && i < p.depth; i++) {
        multiply_row(b + i * WIDTH, a[i], x, n);
        if (by_product) round(x, *by_product);
        if (add_row(x, high, low, rest, n)) spill(n, any), any = true;
      }
      finish_row(high, low, x, n);
      if (any) settle(n);
      round(x, by_sum);
      if (!p.compensated) {
        memcpy(sum, x, sizeof sum);
        continue;
      }
      odd_row(sum, x, 1, y, n);  // y is the new sum, x what is added to it
      round(y, by_sum);
      odd_row(y, sum, -1, rest, n);
      round(rest, by_sum);
      odd_row(rest, x, -1, lost, n);
      round(lost, by_sum);
      for (int64_t j = 0; j < n; j++) {
        lost[j] = lost[j] - lost[j] == 0 ? lost[j] : 0;
        sum[j] = y[j];
      }
    }
    memcpy(out, sum, sizeof sum);
  }

 private:
  // Where two doubles do not hold a sum exactly, the rest goes into a fixed-point number.
  void spill(int64_t n, bool begun) {
    if (totals.empty()) totals.resize(WIDTH);
    if (!begun) memset(spilt, 0, sizeof spilt);
    for (int64_t j = 0; j < n; j++) {
      if (!(rest[j] < 0 || rest[j] > 0)) continue;
      if (!spilt[j]) totals[j].clear(), spilt[j] = true;
      totals[j].add(rest[j]);
    }
  }
  void settle(int64_t n) {
    for (int64_t j = 0; j < n; j++) {
      if (!spilt[j] || high[j] - high[j] != 0) continue;
      totals[j].add(high[j]);
      totals[j].add(low[j]);
      x[j] = totals[j].rounded_to_odd();
    }
  }
};

void general(const Product& p, const Grid* multiply, const Grid& accumulate, const float* a,
             const float* b, float* out, int threads) {
  const int64_t chunks = (p.depth + p.chunk - 1) / p.chunk;
  const int64_t roundings = (multiply ? p.depth : 0) + chunks * (p.compensated ? 4 : 1);
  over_tiles<double, 1, WIDTH>(
      p, a, b, out, threads,
      [&](const double* left, const double* right, double* to, int64_t index, int64_t n) {
        std::unique_ptr<Row> row(new Row);
        Words words(p, index * roundings * WIDTH);
        const General<double> by_sum(accumulate, false, 0);
        if (multiply) {
          const General<double> by_product(*multiply, false, 0);
          row->make(p, left, right, &by_product, by_sum, words, to, n);
        } else {
          row->make(p, left, right, nullptr, by_sum, words, to, n);
        }
      });
}

// ---- choosing
// -----------------------------------------------------------------------------------

template <class T, class ByProduct, class BySum, Sums SUMS, bool KAHAN>
void tiled(const Product& p, const Grid* multiply, const Grid& accumulate, const float* a,
           const float* b, float* out, int threads) {
  constexpr int R = 4, C = KAHAN || SUMS == ODD ? 1 : 2, L = C * VECTOR / int(sizeof(T));
  const ByProduct by_product(multiply ? *multiply : accumulate);
  const BySum by_sum(accumulate);
  over_tiles<T, R, L>(p, a, b, out, threads,
                      [&](const T* left, const T* right, T* to, int64_t, int64_t) {
                        tile<T, ByProduct, BySum, SUMS, KAHAN, R, C>(left, right, to, p.depth,
                                                                    p.chunk, by_product, by_sum);
                      });
}

bool regular(const Grid& g) {  // what Magic and Integer can round to
  return g.has(SUBNORMALS) && g.has(SIGNED) && g.has(NEGATIVE_ZERO) && !g.has(INTEGER);
}
bool is_float(const Grid& g) {
  return regular(g) && g.mantissa_bits == 23 && g.min_exponent == -126 &&
         bits_of(g.largest_value) == INF - 1 && bits_of(g.overflow_value) == INF &&
         bits_of(g.infinite_value) == INF;
}
bool one_fate(const Grid& g) {  // overflow and infinity become the same
  return bits_of(g.overflow_value) == bits_of(g.infinite_value);
}
template <class T>
bool magic(const Grid& g) {
  return g.mantissa_bits > 0 &&
         (sizeof(T) == 8 || exponent_of(g.largest_value) <= 103 + g.mantissa_bits);
}
bool integer_in_float(const Grid& g) {
  return g.mantissa_bits < 23 && g.min_exponent >= -126 &&
         g.min_exponent + 23 - g.mantissa_bits <= 127;
}

int log2_up(int64_t n) { return n > 1 ? 64 - __builtin_clzll(uint64_t(n - 1)) : 0; }

void matmul(const Product& p, const Grid* multiply, const Grid& accumulate, const float* a,
            const float* b, float* out, int threads) {
  const Grid &c = accumulate, &m = multiply ? *multiply : accumulate;
  const bool kahan = p.compensated;
  auto slowly = [&] { general(p, multiply, accumulate, a, b, out, threads); };
#define TILED(...) return tiled<__VA_ARGS__>(p, multiply, accumulate, a, b, out, threads)
  if (p.rounding != EVEN || !regular(c) || !regular(m)) return slowly();
  if (multiply && p.chunk == 1 && is_float(m) && is_float(c)) {
    if (kahan) TILED(float, Exact<float>, Exact<float>, PLAIN, true);
    TILED(float, Exact<float>, Exact<float>, PLAIN, false);
  }
  const Range left(a, p.batch, p.rows, p.depth, p.a_strides);
  const Range right(b, p.batch, p.depth, p.columns, p.b_strides);
  const bool special = left.special || right.special;
  // Magic and Integer do not tell an infinity from an overflow.
  const bool products_infinite = bits_of(m.overflow_value) == INF && multiply;
  if (special && multiply && !one_fate(m)) return slowly();
  if ((special || products_infinite) && !one_fate(c)) return slowly();
  const bool narrower = m.mantissa_bits <= c.mantissa_bits;
  const int low = left.low + right.low, high = left.high + right.high;  // of products
  // Every |rounded product| is at most twice the product, so the sum S of their magnitudes is below
  // 2**(high + 1 + log2 depth). Rounding to nearest goes no farther than back to the accumulator,
  // so each step adds at most twice its terms: |accumulator| <= 2 S, partial sums <= 3 S.
  const int highest = high + 1 + log2_up(p.depth) + 2;
  const bool infinite = bits_of(c.overflow_value) == INF;
  const bool calm = !special && high <= exponent_of(m.largest_value);
  const bool calm_sums = calm && !kahan && highest <= exponent_of(c.largest_value);

  const bool exact = left.bits + right.bits <= 24 && low >= -149 && high <= 128;
  if (multiply && p.chunk == 1 && exact && narrower && integer_in_float(m)) {
    if (is_float(c)) {
      if (kahan) TILED(float, Integer<float>, Exact<float>, PLAIN, true);
      TILED(float, Integer<float>, Exact<float>, PLAIN, false);
    }
    const bool inside = exponent_of(m.largest_value) <= 125 && exponent_of(c.largest_value) <= 125;
    if (c.mantissa_bits <= 10 && integer_in_float(c) && (one_fate(c) || inside)) {
      if (magic<float>(m) && magic<float>(c)) {
        if (kahan && calm && infinite) TILED(float, Calm<float>, Infinite<float>, PLAIN, true);
        if (kahan) TILED(float, Magic<float>, Magic<float>, PLAIN, true);
        if (calm_sums) TILED(float, Calm<float>, Calm<float>, PLAIN, false);
        if (calm) TILED(float, Calm<float>, Magic<float>, PLAIN, false);
        TILED(float, Magic<float>, Magic<float>, PLAIN, false);
      }
      if (kahan) TILED(float, Integer<float>, Integer<float>, PLAIN, true);
      TILED(float, Integer<float>, Integer<float>, PLAIN, false);
    }
  }

  const bool magical = magic<double>(m) && magic<double>(c);
  if (multiply && p.chunk == 1 && narrower) {
    if (magical && kahan && infinite)
      TILED(double, Magic<double>, Infinite<double>, PLAIN, true);
    if (magical && kahan) TILED(double, Magic<double>, Magic<double>, PLAIN, true);
    if (magical && calm_sums) TILED(double, Calm<double>, Calm<double>, PLAIN, false);
    if (magical) TILED(double, Magic<double>, Magic<double>, PLAIN, false);
    if (kahan) TILED(double, Integer<double>, Integer<double>, PLAIN, true);
    TILED(double, Integer<double>, Integer<double>, PLAIN, false);
  }
  // A rounded multiple of 2**low is one again (where the grid is finer, it is not rounded at all),
  // unless it becomes the largest number.
  auto last_bit = [](const Grid& g) { return exponent_of(g.largest_value) - g.mantissa_bits; };
  const int of_c = last_bit(c), of_m = multiply ? last_bit(m) : of_c;
  const int all = low < of_c ? (low < of_m ? low : of_m) : (of_c < of_m ? of_c : of_m);
  if (!kahan && highest - all <= 53 && magical) {
    if (multiply) TILED(double, Magic<double>, Magic<double>, CHUNKS, false);
    TILED(double, Exact<double>, Magic<double>, CHUNKS, false);
  }
  if (!multiply && p.chunk == 1 && magical) {
    if (kahan) TILED(double, Exact<double>, Magic<double>, ODD, true);
    TILED(double, Exact<double>, Magic<double>, ODD, false);
  }
  slowly();
#undef TILED
}

}  // namespace
