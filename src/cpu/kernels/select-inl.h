// Exact top-k of one array of scores: a radix select on words in the order of scores, then one pass that writes
// indices.
//
// The k-th largest word is found digit by digit (11, 11 and 10 bits): a histogram of the first digit over all scores,
// then of the next digit over those that share the first with the k-th, and so on; each pass reads the scores where
// they lie (in L2: 8,192 to 32,768 of them) and builds the words anew, which costs less than storing them. The last
// pass writes the indices of larger words and, from the left, of as many equal ones as are still wanted: ascending,
// packed, and a tie goes to the smaller index. Four histograms take turns, so that equal digits in neighbours do not
// wait for each other's store. About 3 cycles a score in all, against 256 for making one with 64 heads.
//
// The selection is a function of the scores alone, so merging selections of pieces (topk of the concatenation of each
// piece's topk, pieces in order of position) gives the same as one pass over everything. That is how rows are split
// over workers and how long rows run in bounded memory.
#pragma once

#include "cpu/kernel_table.h"

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {
namespace {

constexpr int kDigitBits = 11;
constexpr int kBins = 1 << kDigitBits;
constexpr int kBinStretch = 64;
constexpr int kHistograms = 4;
constexpr int64_t kHistogramBytes = int64_t{kHistograms} * kBins * 4;

// Scores of either element type as fp32; the first n lanes, the others being 0.
GANNET_INLINE F load_scores(const float* p) { return loadu(p); }
GANNET_INLINE F load_scores(const float* p, int n) { return loadu_n(p, n); }
GANNET_INLINE F load_scores(const uint16_t* p) { return load_bf16(p); }
GANNET_INLINE F load_scores(const uint16_t* p, int n) {
  uint16_t rest[kLanes] = {};
  std::memcpy(rest, p, static_cast<size_t>(n) * sizeof(uint16_t));
  return load_bf16(rest);
}
GANNET_INLINE float score_at(const float* p) { return *p; }
GANNET_INLINE float score_at(const uint16_t* p) {
  const uint32_t bits = uint32_t{*p} << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

/// All larger words belong to the selection, and the first `equals` scores with this very word.
struct Threshold {
  uint32_t word;
  int64_t equals;
};

/// Counts digits (word >> shift) & (kBins - 1) of the words whose higher bits are `prefix` (all where shift_prefix is
/// 32).
template <class Score>
GANNET_INLINE void count_digits(const Score* scores, int64_t n, uint32_t prefix, int shift_prefix, int shift,
                                uint32_t* histograms) {
  std::memset(histograms, 0, static_cast<size_t>(kHistogramBytes));
  const W want = set1_w(prefix);
  int64_t i = 0;
  uint32_t words[kLanes];
  for (; i + kLanes <= n; i += kLanes) {
    const W word = order_key(load_scores(scores + i));
    if (shift_prefix == 32) {
      store_w(words, shift_right(word, shift));
#pragma GCC unroll 16
      for (int l = 0; l < kLanes; ++l) ++histograms[(l % kHistograms) * kBins + words[l]];
    } else {
      uint32_t bits = equal_bits(shift_right(word, shift_prefix), want);
      if (bits == 0) continue;
      store_w(words, shift_right(word, shift));
      for (; bits != 0; bits &= bits - 1) {
        const int l = __builtin_ctz(bits);
        ++histograms[(l % kHistograms) * kBins + (words[l] & (kBins - 1))];
      }
    }
  }
  if (i < n) {
    const int rest = static_cast<int>(n - i);
    const W word = order_key(load_scores(scores + i, rest));
    uint32_t bits = shift_prefix == 32 ? ~0u : equal_bits(shift_right(word, shift_prefix), want);
    bits &= (1u << rest) - 1u;
    store_w(words, shift_right(word, shift));
    for (; bits != 0; bits &= bits - 1) ++histograms[words[__builtin_ctz(bits)] & (kBins - 1)];
  }
}

/// The digit of the k-th largest of what was counted; *k becomes its rank among those with that digit, *in_bin how many
/// those are.
GANNET_INLINE uint32_t digit_of_kth(const uint32_t* histograms, int64_t* k, int64_t* in_bin) {
  int64_t left = *k;
  // Stretches of bins first, which the compiler adds with vectors: bin by bin would cost as much as 1,000 scores.
  int bin = kBins;
  for (; bin > kBinStretch; bin -= kBinStretch) {
    uint32_t c = 0;  // at most as many as there are scores, below 2^31
    for (int h = 0; h < kHistograms; ++h) {
      for (int i = 0; i < kBinStretch; ++i) c += histograms[h * kBins + bin - kBinStretch + i];
    }
    if (left <= c) break;
    left -= c;
  }
  for (;;) {
    --bin;
    int64_t c = 0;
    for (int h = 0; h < kHistograms; ++h) c += histograms[h * kBins + bin];
    if (left <= c || bin == 0) {
      *k = left;
      *in_bin = c;
      return static_cast<uint32_t>(bin);
    }
    left -= c;
  }
}

/// 0 < k < n; histograms: kHistogramBytes of scratch.
template <class Score>
inline Threshold find_threshold(const Score* scores, int64_t n, int64_t k, uint32_t* histograms) {
  constexpr int kFirst = 32 - kDigitBits, kSecond = kFirst - kDigitBits;  // 21, 10
  int64_t in_bin;
  count_digits(scores, n, 0, 32, kFirst, histograms);
  uint32_t prefix = digit_of_kth(histograms, &k, &in_bin);
  // Where all that share the digits so far are wanted, the rest of the digits does not matter. Then the prefix is not
  // 0, since k < n.
  if (in_bin == k) return {(prefix << kFirst) - 1, 0};
  count_digits(scores, n, prefix, kFirst, kSecond, histograms);
  prefix = (prefix << kDigitBits) | digit_of_kth(histograms, &k, &in_bin);
  if (in_bin == k) return {(prefix << kSecond) - 1, 0};
  // The last digit has kSecond bits: shifted by 0 and masked with kBins - 1 it would keep a bit of the one before,
  // which is the same for all that are counted.
  count_digits(scores, n, prefix, kSecond, 0, histograms);
  const uint32_t low = digit_of_kth(histograms, &k, &in_bin) & ((1u << kSecond) - 1u);
  return {(prefix << kSecond) | low, k};
}

/// Writes the k selected indices, ascending; 0 < k < n.
template <class Score>
inline void select_indices(const Score* scores, int64_t n, int64_t k, uint32_t* histograms, int32_t* out) {
  const Threshold threshold = find_threshold(scores, n, k, histograms);
  const W edge = set1_w(threshold.word);
  int64_t equals = threshold.equals, written = 0;
  for (int64_t i = 0; i < n && written < k; i += kLanes) {
    const int lanes = n - i < kLanes ? static_cast<int>(n - i) : kLanes;
    const W word = order_key(lanes == kLanes ? load_scores(scores + i) : load_scores(scores + i, lanes));
    const uint32_t real = (1u << lanes) - 1u;  // kLanes is at most 16
    uint32_t bits = greater_bits(word, edge) & real;
    uint32_t same = equal_bits(word, edge) & real;
    for (; same != 0 && equals > 0; same &= same - 1, --equals) bits |= same & (~same + 1u);
    if (bits != 0) written += compress_lanes(out + written, bits, static_cast<int32_t>(i));
  }
}

// ---- selections that grow piece by piece
// ------------------------------------------------------------------------------

/// The selection so far: `count` entries in order of position. `scores` has room for k + the longest piece, and the
/// next piece's scores go to scores + count.
struct RunningSelection {
  float* scores;
  int32_t* positions;  // [k]
  int64_t count;
};

/// Takes in a piece of n scores that lie at s->scores + s->count, of positions first, first + 1, ...
/// indices: [k] of scratch.
inline void take_piece(RunningSelection* s, int64_t n, int64_t first, int64_t k, uint32_t* histograms,
                       int32_t* indices) {
  const int64_t total = s->count + n;
  if (total <= k) {
    for (int64_t i = 0; i < n; ++i) s->positions[s->count + i] = static_cast<int32_t>(first + i);
    s->count = total;
    return;
  }
  select_indices(s->scores, total, k, histograms, indices);
  const int64_t kept = s->count;
  for (int64_t i = 0; i < k; ++i) {  // indices[i] >= i: nothing is overwritten before it is read
    const int64_t from = indices[i];
    s->scores[i] = s->scores[from];
    s->positions[i] = from < kept ? s->positions[from] : static_cast<int32_t>(first + from - kept);
  }
  s->count = k;
}

}  // namespace
}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet
