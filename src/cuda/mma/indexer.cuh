// Index logits on tensor cores through mma.sync, sm_80 and newer:
//   logit(t, s) = scale(s) * sum over heads h of w(t, h) * relu(q(t, h) . k(s))
//
// Shapes and cost, 64 heads of 128. A (row, key) is 16,384 flop; a key is 132 bytes of cache and 4 bytes of result a
// row. mma.sync reaches about 0.6 of Hopper's wgmma rate for 16-bit operands, some 500 TFLOP/s on an H200 at the clocks
// it keeps: 31 G (row, key) a second. Decode with one row therefore takes 31 G * 136 bytes = 4.2 TB/s at that rate, as
// fast as memory; from two rows on, and in prefill, the tensor cores are what bounds.
//
// Which instruction. mma.sync for e4m3 operands is an instruction on sm_89 and sm_120 only; for sm_90 and sm_100 ptxas
// makes 12 conversions to fp16 and two fp16 HMMA of each (read off the SASS of nvcc 13.0). So values are converted
// here, where that is paid once for many products: e4m3 queries and keys are exact in fp16; bf16 queries take keys in
// bf16. Products of either are exact in the fp32 accumulators.
//
// A warp takes tiles of 64 keys x all heads of a row. Keys are M (A operand): 16 rows x 4, heads are N: the sum over
// heads is then mostly within a thread. For 64 heads: 128 accumulators, 64 registers with the tile's e4m3 keys, which
// stay there for all rows of the unit and become fp16 fragments as they are used (128 conversions for 256 HMMA).
// K, the head dimension, is permuted, the same way in both operands: a thread (lane % 4 = t) holds the 16 bytes
// [64 c + 16 t, + 16) of a key for chunk c, each word of four values is one step of 16 of K. So a key is read with
// 16-byte accesses and nothing is shuffled.
// Queries lie in shared memory as 16-bit B fragments in the order in which they are read: for two groups of 8 heads and
// a step of K, 32 lanes x 16 bytes. A row of 64 heads is 16 KB, read once by each warp for 64 keys: 128 cycles of
// shared memory against 256 HMMA, which take 1,000 cycles of a quarter of the chip's multiprocessor at wgmma's rate.
// After the products: relu and weight are 2 instructions an accumulator, 256 for 256 HMMA; the other warp of the
// scheduler multiplies meanwhile. The sums of four lanes are exchanged so that each lane ends with two keys.
//
// Units. A unit is up to rows_per_unit rows of one request against all keys that the last of them sees. Its queries lie
// in shared memory (8 rows of 64 heads: 128 KB) while tiles of keys stream through a stage of 8 KB a warp: once a tile
// has moved to registers the next one is under way. No barriers between the tiles; two where queries change. Decode
// with few rows puts several units into shared memory at once (a phase), prefill reads the keys once for 8 rows: from
// L2, 132 bytes for 131,072 flop.
// Schedule, without a plan: the grid is one block a multiprocessor; each counts all tiles of all units (a sum over
// requests and a scan over threads, about 1 us for some hundreds of requests) and takes an equal stretch of them.
//
// Determinism: the order of sums depends on the number of heads and head_dim alone, so a logit has the same bits
// whatever the batch, the pages or the machine's number of multiprocessors.
//
// Prediction for H200: prefill 400 TFLOP/s; decode of one row 3 TB/s from 64 M keys on, two rows 1.7 TB/s;
// batch 1 of 4,096 keys 6 us (launch, lengths, pages, keys: four dependent reads).
#pragma once

#include <cuda_fp16.h>

#include "cuda/common/index_units.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace mma {
namespace indexer {

using namespace index_units;

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kHoistedHeadPairs = 1;  // up to 16 heads have registers for converted keys
constexpr int kMaxUnits = 8;          // of a phase
constexpr int kMaxSlots = 8;          // rows of queries in shared memory

/// Operands of the tensor cores, heads padded to 16 * kHeadPairs, head_dim 64 * kChunks.
template <bool kBf16Operands, int kHeadPairs_, int kChunks_>
struct Config {
  static constexpr bool kBf16 = kBf16Operands;
  static constexpr int kHeadPairs = kHeadPairs_, kHeads = 16 * kHeadPairs, kGroups = 2 * kHeadPairs;
  static constexpr int kChunks = kChunks_, kDim = 64 * kChunks, kSteps = 4 * kChunks;
  static constexpr int kPieces = kDim / 16;  // of 16 bytes in an e4m3 key
  static constexpr int kSlotWords = kHeads * kDim / 2;
  static constexpr int kStageBytes = kTileKeys * kDim;
  static constexpr size_t slot_bytes() { return 4 * kSlotWords + 4 * kHeads; }
  static constexpr size_t shared_bytes(int slots) {
    return static_cast<size_t>(kWarps) * kStageBytes + static_cast<size_t>(slots) * slot_bytes();
  }
};

// ---- conversions ----------------------------------------------------------------------------------------------------

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
constexpr bool kConvertsE4m3 = true;
#else
constexpr bool kConvertsE4m3 = false;
#endif

/// Four e4m3 values as four 16-bit values: two in x, two in y, in an order that is the same for keys and queries. Where
/// hardware has no conversion, NaN comes out as 480: has_nan() finds it.
template <bool kBf16>
__device__ inline void widen(uint32_t w, uint32_t& x, uint32_t& y) {
  if constexpr (!kBf16 && kConvertsE4m3) {
    asm("{\n .reg .b16 lo, hi;\n mov.b32 {lo, hi}, %2;\n cvt.rn.f16x2.e4m3x2 %0, lo;\n cvt.rn.f16x2.e4m3x2 %1, hi;\n}"
        : "=r"(x), "=r"(y)
        : "r"(w));
  } else {
    // Sign to the top, exponent and mantissa to where the wider type has the lowest bits of its exponent and the
    // highest of its mantissa; the difference of the biases is a product by a power of two, exact for subnormal values
    // too.
    constexpr int kShift = kBf16 ? 4 : 1;
    constexpr uint32_t kMagnitude = kBf16 ? 0x07f007f0u : 0x3f803f80u;
    const uint32_t even = w << 8;
    x = (even & 0x80008000u) | ((even >> kShift) & kMagnitude);
    y = (w & 0x80008000u) | ((w >> kShift) & kMagnitude);
    if constexpr (kBf16) {
      constexpr uint32_t kFactor = 0x7b807b80u, kMinusZero = 0x80008000u;  // 2^120
      asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(x) : "r"(kFactor), "r"(kMinusZero));
      asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(y) : "r"(kFactor), "r"(kMinusZero));
    } else {
      constexpr uint32_t kFactor = 0x5c005c00u;  // 2^8
      asm("mul.f16x2 %0, %0, %1;" : "+r"(x) : "r"(kFactor));
      asm("mul.f16x2 %0, %0, %1;" : "+r"(y) : "r"(kFactor));
    }
  }
}
/// True where widen() leaves NaN to its caller.
template <bool kBf16>
constexpr bool kNanApart = kBf16 || !kConvertsE4m3;

/// Bit 7 of each byte: the byte is an e4m3 NaN.
__device__ inline uint32_t nan_bytes(uint32_t w) { return ((w & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u; }

/// The same with NaN in its place.
template <bool kBf16>
__device__ inline void widen_all(uint32_t w, uint32_t& x, uint32_t& y) {
  widen<kBf16>(w, x, y);
  if constexpr (kNanApart<kBf16>) {
    const uint32_t n = nan_bytes(w);
    x |= ((n >> 7) & 0x00010001u) * 0x7fffu;
    y |= ((n >> 15) & 0x00010001u) * 0x7fffu;
  }
}

/// d[16x8] = (kFirst ? 0 : d) + a[16x16] b[16x8].
template <bool kBf16, bool kFirst>
__device__ inline void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kFirst) {
    if constexpr (kBf16)
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
          "{%10,%10,%10,%10};"
          : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
    else
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
          : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
  } else {
    if constexpr (kBf16)
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// The same with kFirst for step 0 of an unrolled loop.
template <bool kBf16>
__device__ inline void multiply_step(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int step) {
  if (step == 0) multiply<kBf16, true>(d, a, b0, b1);
  else multiply<kBf16, false>(d, a, b0, b1);
}

/// max(x, 0), NaN for NaN.
__device__ inline float relu(float x) {
  asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(x));
  return x;
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

template <class C>
__global__ void __launch_bounds__(kThreads, 1) index_logits_kernel(const __grid_constant__ Problem p) {
  wait_for_stream();
  let_next_start();
  extern __shared__ __align__(128) unsigned char shared[];
  auto* queries = reinterpret_cast<uint32_t*>(shared);  // [slot][head pair][step][lane][4]
  const int slots = p.rows_per_unit * p.units_per_phase;
  auto* weights = reinterpret_cast<float*>(queries + slots * C::kSlotWords);  // [slot][head]
  const uint32_t stages = shared_address(weights + slots * C::kHeads);
  __shared__ Schedule<kWarps, kMaxSlots> schedule;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  const int g = lane / 4, t = lane % 4;
  constexpr uint32_t kAll = 0xffffffffu;

  int64_t begin, end;
  if (!schedule.start(p, begin, end)) return;

  const int64_t to_scales = int64_t{p.cache.page_size} * C::kDim;  // from the start of a page
  const auto* pool = static_cast<const unsigned char*>(p.cache.data);
  const bool tile_in_page = p.cache.page_size % kTileKeys == 0;
  const uint32_t stage = stages + warp * C::kStageBytes;
  // Copies: a step of the warp takes 512 bytes, 32 / kPieces keys. Odd keys of 128 bytes have their halves swapped, so
  // that eight lanes that read two keys below meet all banks.
  constexpr int kKeysPerStep = 32 / C::kPieces, kCopySteps = kTileKeys / kKeysPerStep;
  const int copy_key = lane / C::kPieces;
  const int copy_piece = lane % C::kPieces ^ (C::kPieces == 8 ? copy_key % 2 * 4 : 0);
  const uint32_t copy_to = stage + copy_key * C::kDim + copy_piece * 16;
  const uint32_t read_from = stage + g * C::kDim;
  const int read_swap = C::kPieces == 8 ? g % 2 * 4 : 0;
  const int my_key = 16 * t + g;  // and 8 more: the keys whose results this lane stores

  for (;;) {
    // A warp's item is a tile with all rows of the unit, as far as there is one for each warp; then a row of a tile, so
    // that the last round of the warps is short.
    const int num_tiles = schedule.num_tiles(p), num_whole = num_tiles / kWarps * kWarps;
    const int num_items = num_whole + (num_tiles - num_whole) * p.rows_per_unit;
    auto tile_of = [&](int item) { return item < num_whole ? item : num_whole + over_rows(p, item - num_whole); };
    const bool last_phase = schedule.last_phase(p, end);
    const Part* const parts = schedule.parts;

    // Starts the copies of a tile into the warp's stage, and reads the scales of this lane's two keys.
    float next_scale[2];
    bool next_known[2];
    int page = -1, offset = 0, count = 0;  // of the item to be started, where a tile lies in one page
    auto look_up = [&](int item) {         // one item ahead of start_tile(), so that nobody waits for a page id
      if (!tile_in_page || item >= num_items) return;
      const int i = tile_of(item);
      const Part& part = parts[schedule.part_of(i)];
      const int first_key = (part.first_tile + i - part.begin) * kTileKeys;
      const PagePlace place = place_in_page(p, first_key);
      page = part.page_ids[place.index];
      offset = place.offset;
      count = part.keys - first_key;
    };
    auto start_tile = [&](int item) {
      if (item >= num_items) return;
      if (tile_in_page) {
        const bool known = page >= 0 && page < p.cache.num_pages;
        const unsigned char* base = pool + (known ? page : 0) * p.cache.page_stride_bytes;
        const unsigned char* source = base + int64_t{offset} * C::kDim + lane * 16;
#pragma unroll
        for (int s = 0; s < kCopySteps; ++s)
          copy_async_16(copy_to + 512 * s, source + 512 * s, known && s * kKeysPerStep + copy_key < count);
        const float* scales = reinterpret_cast<const float*>(base + to_scales) + offset;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          next_known[h] = known;
          next_scale[h] = known && my_key + 8 * h < count ? scales[my_key + 8 * h] : 0.0f;
        }
      } else {
        const int i = tile_of(item);
        const Part& part = parts[schedule.part_of(i)];
        const int first_key = (part.first_tile + i - part.begin) * kTileKeys;
        const unsigned char* value[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int k = my_key + 8 * h, position = first_key + k;
          const int64_t page = first_key + k < part.keys ? part.page_ids[position / p.cache.page_size] : -1;
          const int64_t offset = position % p.cache.page_size;
          next_known[h] = page >= 0 && page < p.cache.num_pages;
          const unsigned char* base = pool + (next_known[h] ? page : 0) * p.cache.page_stride_bytes;
          value[h] = next_known[h] ? base + offset * C::kDim : nullptr;
          next_scale[h] = next_known[h] ? reinterpret_cast<const float*>(base + to_scales)[offset] : 0.0f;
        }
#pragma unroll
        for (int s = 0; s < kCopySteps; ++s) {
          // Key k = 16 m + 8 h + r is known to lane 4 r + m as its key h; h is the same for all keys of a step.
          const int k = s * kKeysPerStep + copy_key, owner = k % 8 * 4 + k / 16;
          const auto from = reinterpret_cast<const unsigned char*>(
              __shfl_sync(kAll, reinterpret_cast<unsigned long long>(value[s * kKeysPerStep / 8 % 2]), owner));
          copy_async_16(copy_to + 512 * s, from != nullptr ? from + lane % C::kPieces * 16 : pool, from != nullptr);
        }
      }
      copy_async_commit();
    };
    look_up(warp);
    start_tile(warp);
    look_up(warp + kWarps);

    // ---- queries and weights of the phase ----
    // Weights are under way before the queries are waited for.
    constexpr int kWeights = (kMaxSlots * C::kHeads + kThreads - 1) / kThreads;
    float weight[kWeights];
    bool has_weight[kWeights];
#pragma unroll
    for (int j = 0; j < kWeights; ++j) {
      const int i = tid + j * kThreads, h = i % C::kHeads, slot = i / C::kHeads;
      const int e = over_rows(p, slot), r = slot - e * p.rows_per_unit;
      has_weight[j] = slot < slots && r < parts[e].num_rows;
      weight[j] = 0.0f;
      if (has_weight[j] && h < p.num_heads) {
        const int64_t row = parts[e].first_row + r;
        weight[j] = p.weights[row * p.weights_stride + h];
      }
    }
    // B of head h, step `step`, for the lanes of quad position `quad`.
    auto fragment = [&](int slot, int h, int step, int quad) {
      return queries + slot * C::kSlotWords + ((h / 16 * C::kSteps + step) * 32 + h % 8 * 4 + quad) * 4 + h / 8 % 2 * 2;
    };
    if constexpr (C::kBf16) {  // 16 bytes are two words of B in each of two steps
      for_each_query_piece<uint16_t, C::kHeads, C::kDim / 8, kThreads>(
          p, parts, slots, [&](int slot, int h, int piece, const uint4& v) {
            uint32_t* to = fragment(slot, h, piece / 8 * 4 + piece % 2 * 2, piece % 8 / 2);
            // widen() of bf16 puts values 0 and 2 of four into one register, 1 and 3 into the other.
            *reinterpret_cast<uint2*>(to) = {__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.x, v.y, 0x7632)};
            *reinterpret_cast<uint2*>(to + 128) = {__byte_perm(v.z, v.w, 0x5410), __byte_perm(v.z, v.w, 0x7632)};
          });
    } else {
      for_each_query_piece<uint8_t, C::kHeads, C::kPieces, kThreads>(
          p, parts, slots, [&](int slot, int h, int piece, const uint4& v) {
            uint32_t* to = fragment(slot, h, piece / 4 * 4, piece % 4);
            const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              uint32_t x, y;
              widen_all<false>(words[j], x, y);
              *reinterpret_cast<uint2*>(to + 128 * j) = {x, y};
            }
          });
    }
#pragma unroll
    for (int j = 0; j < kWeights; ++j)
      if (has_weight[j]) weights[tid + j * kThreads] = weight[j];
    __syncthreads();

    // ---- tiles ----
#pragma unroll 1
    for (int item = warp; item < num_items; item += kWarps) {
      const int i = tile_of(item);
      const int e = schedule.part_of(i);
      const int first_key = (parts[e].first_tile + i - parts[e].begin) * kTileKeys;
      copy_async_wait<0>();
      __syncwarp();
      uint4 keys[4][2][C::kChunks];  // of key 16 m + 8 h + g the bytes [64 c + 16 t, + 16)
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
          for (int c = 0; c < C::kChunks; ++c) {
            const uint32_t at = read_from + (16 * m + 8 * h) * C::kDim + ((4 * c + t) ^ read_swap) * 16;
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                         : "=r"(keys[m][h][c].x), "=r"(keys[m][h][c].y), "=r"(keys[m][h][c].z), "=r"(keys[m][h][c].w)
                         : "r"(at)
                         : "memory");
          }
      float scale[2] = {next_scale[0], next_scale[1]};
      const bool known[2] = {next_known[0], next_known[1]};
      __syncwarp();
      start_tile(item + kWarps);
      look_up(item + 2 * kWarps);
      if constexpr (kNanApart<C::kBf16>) {
        // A NaN in a key makes all of its logits NaN: through the scale.
        uint32_t found = 0;  // bit 2 m + h
#pragma unroll
        for (int m = 0; m < 4; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            uint32_t n = 0;
#pragma unroll
            for (int c = 0; c < C::kChunks; ++c) {
              const uint4 k = keys[m][h][c];
              n |= nan_bytes(k.x) | nan_bytes(k.y) | nan_bytes(k.z) | nan_bytes(k.w);
            }
            if (n != 0) found |= 1u << (2 * m + h);
          }
        found |= __shfl_xor_sync(kAll, found, 1);
        found |= __shfl_xor_sync(kAll, found, 2);
#pragma unroll
        for (int h = 0; h < 2; ++h)
          if ((found >> (2 * t + h) & 1) != 0) scale[h] = NAN;
      }

      const int64_t first_row = parts[e].first_row;
      const int first_slot = e * p.rows_per_unit;
      const int first = item < num_whole ? 0 : item - num_whole - (i - num_whole) * p.rows_per_unit;
      const int last = min(item < num_whole ? p.rows_per_unit : first + 1, parts[e].num_rows);
#pragma unroll 1
      for (int r = first; r < last; ++r) {
        const int bound = schedule.bounds[first_slot + r] - first_key;
        if (bound <= 0) continue;
        const uint4* query = reinterpret_cast<const uint4*>(queries + (first_slot + r) * C::kSlotWords) + lane;
        float acc[4][C::kGroups][4];
#pragma unroll
        for (int step = 0; step < C::kSteps; ++step) {
          uint32_t a[4][4];
#pragma unroll
          for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const uint4 k = keys[m][h][step / 4];
              uint32_t w = step % 4 == 0 ? k.x : step % 4 == 1 ? k.y : step % 4 == 2 ? k.z : k.w;
              // Else the compiler moves the conversions out of the loop over rows, where they need 128 registers.
              if constexpr (C::kHeadPairs > kHoistedHeadPairs) asm volatile("" : "+r"(w));
              widen<C::kBf16>(w, a[m][h], a[m][2 + h]);
            }
#pragma unroll
          for (int n = 0; n < C::kHeadPairs; ++n) {
            const uint4 b = query[(n * C::kSteps + step) * 32];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
              multiply_step<C::kBf16>(acc[m][2 * n], a[m], b.x, b.y, step);
              multiply_step<C::kBf16>(acc[m][2 * n + 1], a[m], b.z, b.w, step);
            }
          }
        }
        // Heads 8 n + 2 t and + 1 of keys 16 m + g and + 8.
        float sum[4][2];
        const float2* weight = reinterpret_cast<const float2*>(weights + (first_slot + r) * C::kHeads) + t;
#pragma unroll
        for (int n = 0; n < C::kGroups; ++n) {
          const float2 w = weight[4 * n];
#pragma unroll
          for (int m = 0; m < 4; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const float x = n == 0 ? w.x * relu(acc[m][n][2 * h]) : fmaf(w.x, relu(acc[m][n][2 * h]), sum[m][h]);
              sum[m][h] = fmaf(w.y, relu(acc[m][n][2 * h + 1]), x);
            }
        }
        // Over the four lanes of a key, so that lane t ends with m = t.
        float half[2][2];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float sent = (t & 2) != 0 ? sum[m][h] : sum[m + 2][h];
            half[m][h] = ((t & 2) != 0 ? sum[m + 2][h] : sum[m][h]) + __shfl_xor_sync(kAll, sent, 2);
          }
        const int64_t at = (first_row + r - p.block.first_row) * p.block.stride + first_key + my_key;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float sent = (t & 1) != 0 ? half[0][h] : half[1][h];
          const float all = ((t & 1) != 0 ? half[1][h] : half[0][h]) + __shfl_xor_sync(kAll, sent, 1);
          if (my_key + 8 * h < bound) {
            // A page outside the pool cannot be scored: the lowest rank, so that it is never preferred to a real key.
            const float logit = known[h] ? all * scale[h] : -INFINITY;
            if (p.block.bf16) static_cast<uint16_t*>(p.block.logits)[at + 8 * h] = float_to_bf16(logit);
            else static_cast<float*>(p.block.logits)[at + 8 * h] = logit;
          }
        }
      }
    }
    if (last_phase) return;
    schedule.next_phase(p, begin, end);
  }
}

}  // namespace indexer
}  // namespace mma
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
