// Absorbed MLA attention on the tensor cores of sm_80 and newer: dense over pages and sparse over slot lists; bf16,
// e4m3 and 656-byte rows; bf16 or e4m3 queries.
//
// Shapes. A lane is a (query row, head) pair of one request (dense) or a head of one row (sparse). A block serves M
// lanes (64, 32 or 16) over a range of keys, a tile of 64 at a time:
//   S = Q K^T        [M x 576] [576 x 64]
//   O = c O + P V    [M x 64] [64 x 512], V being the first 512 columns of the K tile in shared memory
// 2 * (576 + 512) = 2,176 flop for a lane and key, 1,152 bytes for a bf16 row: M lanes give 1.89 M flop a byte. With 64
// lanes the tensor cores decide on an H200 (ridge 180 flop a byte), with 16 the memory.
//
// Warps. Eight, one block a multiprocessor: O is half of the register file at M = 64. For O a warp has all lanes and 64
// columns (128 registers at M = 64), so that each value of V is read from shared memory once. For S at M = 64 a warp
// has 32 lanes, 32 keys and every other step of 16 columns; the pair of warps that share lanes and keys exchange half
// of their sums through shared memory and each softmaxes 16 lanes. With fewer lanes a warp has 16 lanes, all columns
// and 16 or 8 keys.
//
// Shared memory, M = 64: Q 72 KB, two tiles of 72 KB, P 8 KB, statistics: 226 KB. Traffic a tile, in KB: S reads Q
// twice and K twice, 288, and exchanges 32; O reads V once and P eight times, 128; the next tile is written, 72. 520 KB
// at 128 bytes a cycle are 4,160 cycles, beside 3,510 of the tensor cores at what mma.sync gives on Hopper (0.62 of
// wgmma's 4,096 flop a cycle) for 8.9 Mflop. S is bound by shared memory (2,560), O by the tensor cores (1,650); with
// 500 for softmax and barriers 4,700 cycles: 420 TFLOP/s on 132 SMs at 1.7 GHz. The version before this one gave each
// warp 16 lanes for S and for O and read 850 KB for the same: 295 TFLOP/s at best. The exchange takes no memory of its
// own: after S nobody needs the tile's rotated columns, nor P of the tile before. Two barriers a tile are of all warps,
// where the tile is there and where P is; the exchange has one of two warps, maxima one of the four that share lanes.
//
// e4m3 rows are copied into half of the free stage, a tile ahead, and converted in their place beside O, by half of the
// warps before their product and by the other half behind it, so that conversions run under products. An e4m3 value is
// a bf16 value; the scale of a kE4m3 pool goes into the softmax scale and into the result, so nothing is rounded. The
// scales of 656-byte rows are applied, to bf16. Where queries are e4m3 too, all operands are half instead of bf16: it
// holds every e4m3 value as well, an instruction widens two (by way of bf16 it takes four: 288 of a warp's 1,150 a
// tile), scores are the same, and weights keep three bits more. With room for one tile only (sm_80 has
// 163 KB a block, sm_86 and sm_89 99) tiles are loaded when the last one has been used, and on 99 KB a block has 16
// lanes.
//
// Masks. Scores of keys that a lane does not see are replaced by select, rows that nobody sees are zeros and not read.
// A key of weight 0, one that others of the block see or one whose score is -inf, must not reach a lane even as 0 * NaN
// or 0 * inf. Tiles are not searched for such values; they show in O, which is then not finite. A piece that ends so is
// done again the careful way: a product for each lane, in which the values of keys without weight are zeros. Its sums
// have the same terms in the same order, so lanes without such values get the same bits either way.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "cuda/common/launch.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/mma/absorbed_schedule.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace mma {

constexpr float kLog2Of = 1.44269504f, kLnOf = 0.69314718f;  // log2(e) and ln(2)
constexpr float kSlack = 8.0f;                               // weights are at most 2^8
constexpr int kBlocks = kWidth / 64;                         // of 64 columns, in which rows lie in shared memory
constexpr int kBlockBytes = kKeys * 128;                     // of a tile: 64 rows of 64 bf16
constexpr int kStageBytes = kBlocks * kBlockBytes;           // 73,728

template <int kM, int kStageCount>
struct Config {
  static constexpr int kLanes = kM, kStages = kStageCount;
  static constexpr int kSplit = kM == 64 ? 2 : 1;     // warps that share a score's columns
  static constexpr int kRowTiles = kM == 64 ? 2 : 1;  // of 16 lanes, for S
  static constexpr int kWarpsM = kM / 16 / kRowTiles, kWarpsN = kWarps / kWarpsM / kSplit;
  static constexpr int kWarpKeys = kKeys / kWarpsN;  // 32, 16 or 8
  static constexpr int kLaneTiles = kM / 16;         // for O
  static constexpr int kQueryBlock = kM * 128, kQueryBytes = kBlocks * kQueryBlock, kWeightBytes = kM * 128;
  static constexpr int kTileBytes = kQueryBytes + kStages * kStageBytes + kWeightBytes;
  static_assert(kM % 16 == 0 && kWarpKeys % 8 == 0 && (kStages == 1 || kStages == 2));

  struct Shared {
    float max[kWarpsN][kM], sum[kWarpsN][kM], top[kM], largest[kM], rescale[kM];
    uint8_t present[kStages][kKeys];
    Line line;
  };
  static constexpr int kSharedBytes = kTileBytes + static_cast<int>(sizeof(Shared));
};

// ---- rows ----------------------------------------------------------------------------------------------------------

/// What names a key's row, loaded well ahead of its use: a page of the table, or a slot of the list.
__device__ inline const int32_t* names_of(const Dense::Place& g) { return g.list.ids; }
__device__ inline const int32_t* names_of(const Sparse::Place& g) { return g.list; }
__device__ inline int32_t name_of(const Dense& p, const Schedule& s, const int32_t* names, int key) {
  return names[s.page_of(p, static_cast<uint32_t>(key))];
}
__device__ inline int32_t name_of(const Sparse&, const Schedule&, const int32_t* names, int key) { return names[key]; }

/// Where the row lies; nullptr for one outside the pool. Positions and sizes fit 32 bits, offsets do not.
__device__ inline const unsigned char* row_of(const Dense& p, const Schedule& s, int key, int32_t name) {
  if (name < 0 || name >= p.cache.num_pages) return nullptr;
  const auto position = static_cast<uint32_t>(key);
  return static_cast<const unsigned char*>(p.cache.data) + name * p.cache.page_stride_bytes +
         (position - s.page_of(p, position) * p.cache.page_size) * p.cache.row_stride_bytes;
}
__device__ inline const unsigned char* row_of(const Sparse& p, const Schedule& s, int, int32_t name) {
  if (name < 0 || name >= p.cache.num_pages * p.cache.page_size) return nullptr;
  const auto position = static_cast<uint32_t>(name);
  const uint32_t page = s.page_of(p, position);
  return static_cast<const unsigned char*>(p.cache.data) + page * p.cache.page_stride_bytes +
         (position - page * p.cache.page_size) * p.cache.row_stride_bytes;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
/// Two e4m3 values, bytes `first` and `first` + 1 of four, as bf16 or half. There is no instruction before sm_89: the
/// seven bits below the sign are moved under the other exponent, which makes them 2^-120 or 2^-8 of the value (small
/// ones too: the product takes subnormals), and NaN, 0x7f, is found by a carry.
template <bool kHalf>
__device__ inline uint32_t widen_pair(uint32_t four, int first) {
  const uint32_t high = __byte_perm(four, 0, first == 0 ? 0x1404 : 0x3424);  // each byte over a zero
  constexpr uint32_t kTwoTo120 = 0x7b807b80u, kTwoTo8 = 0x5c005c00u, kMinusZero = 0x80008000u;
  const uint32_t sign = high & 0x80008000u;
  uint32_t pair;
  if constexpr (kHalf)
    asm("fma.rn.f16x2 %0, %1, %2, %3;"
        : "=r"(pair)
        : "r"(sign | ((high >> 1) & 0x3f803f80u)), "r"(kTwoTo8), "r"(kMinusZero));
  else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(pair)
        : "r"(sign | ((high >> 4) & 0x07f007f0u)), "r"(kTwoTo120), "r"(kMinusZero));
  const uint32_t nan = ((four & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
  return pair | (__byte_perm(nan, 0, first == 0 ? 0x9988 : 0xbbaa) & 0x7fff7fffu);  // signs, replicated
}
/// Four e4m3 values as bf16: exact.
__device__ inline uint2 widen_e4m3(uint32_t four) { return {widen_pair<false>(four, 0), widen_pair<false>(four, 2)}; }
/// As half: exact.
__device__ inline uint2 widen_to_half(uint32_t four) { return {widen_pair<true>(four, 0), widen_pair<true>(four, 2)}; }
/// The same times a scale.
__device__ inline uint2 widen_e4m3(uint32_t four, float scale) {
  const auto times = [&](uint32_t two) {
    return round_to_bf16x2(__uint_as_float(two << 16) * scale, __uint_as_float(two & 0xffff0000u) * scale);
  };
  return {times(widen_pair<false>(four, 0)), times(widen_pair<false>(four, 2))};
}
#else
__device__ inline float2 widen_pair(uint32_t two) {  // by way of half, which holds every e4m3 value
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3)));
}
/// Four e4m3 values as bf16: exact.
__device__ inline uint2 widen_e4m3(uint32_t four) {
  const float2 low = widen_pair(four & 0xffffu), high = widen_pair(four >> 16);
  return {round_to_bf16x2(low.x, low.y), round_to_bf16x2(high.x, high.y)};
}
/// As half: exact.
__device__ inline uint2 widen_to_half(uint32_t four) {
  uint2 x;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(x.x) : "h"(static_cast<uint16_t>(four)));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(x.y) : "h"(static_cast<uint16_t>(four >> 16)));
  return x;
}
/// The same times a scale.
__device__ inline uint2 widen_e4m3(uint32_t four, float scale) {
  const float2 low = widen_pair(four & 0xffffu), high = widen_pair(four >> 16);
  return {round_to_bf16x2(low.x * scale, low.y * scale), round_to_bf16x2(high.x * scale, high.y * scale)};
}
#endif

/// What the products multiply.
struct Bf16Operands {
  static constexpr bool kHalf = false;
  static constexpr float kLift = 0.0f;
  __device__ static uint2 widen(uint32_t four) { return widen_e4m3(four); }
  __device__ static uint32_t round(float low, float high) { return round_to_bf16x2(low, high); }
  __device__ static void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_bf16(d, a, b0, b1);
  }
};
struct HalfOperands {
  static constexpr bool kHalf = true;
  // Weights are multiplied by 2^7, at most 2^15 then: half rounds those below 2^-25 to zeros, which many keys of a long
  // request may have that together count. Now it is those below 2^-32.
  static constexpr float kLift = 7.0f;
  __device__ static uint2 widen(uint32_t four) { return widen_to_half(four); }
  __device__ static uint32_t round(float low, float high) { return round_to_half2(low, high); }
  __device__ static void multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma_half(d, a, b0, b1);
  }
};

/// Loads the tiles of a piece. Rows in shared memory are 128 bytes in each of nine blocks; the 16-byte piece c of row r
/// lies at c ^ (r % 8), so that eight rows of an ldmatrix are in different banks. fetch_names() for a tile, then
/// begin(), then copy() of each block, then convert(); keys from `end` on are not there.
template <LatentFormat kFormat, class Operands>
struct Loader;

template <>
struct Loader<LatentFormat::kBf16, Bf16Operands> {
  static constexpr bool kConverts = false;
  static constexpr int kRows = 2;  // a thread's: eight threads copy 128 bytes of a row
  int32_t names[kRows];
  const unsigned char* sources[kRows];
  uint32_t target;
  bool there[kRows];

  template <class Problem>
  __device__ void fetch_names(const Problem& p, const Schedule& s, const int32_t* list, int tile, int end) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int key = tile * kKeys + static_cast<int>(threadIdx.x) / 8 + 32 * i;
      names[i] = key < end ? name_of(p, s, list, key) : -1;
    }
  }
  template <class Problem>
  __device__ void begin(const Problem& p, const Schedule& s, int tile, uint32_t stage, uint8_t* present) {
    const int piece = static_cast<int>(threadIdx.x) % 8, first = static_cast<int>(threadIdx.x) / 8;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first + 32 * i;
      sources[i] = row_of(p, s, tile * kKeys + row, names[i]);
      there[i] = sources[i] != nullptr;
      if (!there[i]) sources[i] = static_cast<const unsigned char*>(p.cache.data);  // not read
      sources[i] += piece * 16;
      if (piece == 0) present[row] = there[i];
    }
    target = stage + first * 128 + ((piece ^ (first % 8)) * 16);
  }
  __device__ void copy(int block) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      copy_async_16(target + block * kBlockBytes + i * 32 * 128, sources[i] + block * 128, there[i]);
  }
  __device__ void convert(unsigned char*) const {}
  __device__ bool all_there() const { return there[0] && there[1]; }
};

/// e4m3 and 656-byte rows: four threads a row, 16 values of each 64 each. Their bytes are copied into blocks 4 to 8 of
/// the row's own place, the scales of a 656-byte row into block 3 and its rotated values where they belong; convert()
/// reads them back and writes the row over them, so that they take no registers and no memory while they travel. The
/// threads of a row are neighbours in a warp, and nobody else touches its place.
template <LatentFormat kFormat, class Operands>
struct Loader {
  static_assert(kFormat == LatentFormat::kE4m3 || kFormat == LatentFormat::kPacked656);
  static constexpr bool kConverts = true, kPacked = kFormat == LatentFormat::kPacked656;
  static constexpr int kPieces = kPacked ? kLatent / 64 : kBlocks;
  static constexpr int kRawBlock = 4, kScaleBlock = 3;
  static constexpr int kRopeOffset = kLatent + 4 * (kLatent / 128);  // in a 656-byte row
  int32_t name;
  const unsigned char* source;
  uint32_t target;  // of the row
  bool there;

  __device__ static int row() { return static_cast<int>(threadIdx.x) / 4; }
  __device__ static int quarter() { return static_cast<int>(threadIdx.x) % 4; }
  /// Where the thread's piece of values 64 b and on waits: two rows that are read together differ in their banks.
  __device__ static int raw_offset(int b) {
    const int r = row();
    return (kRawBlock + b / 2) * kBlockBytes + (((((b ^ r) & 1) * 4 + quarter()) ^ (r % 8)) * 16);
  }

  template <class Problem>
  __device__ void fetch_names(const Problem& p, const Schedule& s, const int32_t* list, int tile, int end) {
    const int key = tile * kKeys + row();
    name = key < end ? name_of(p, s, list, key) : -1;
  }
  template <class Problem>
  __device__ void begin(const Problem& p, const Schedule& s, int tile, uint32_t stage, uint8_t* present) {
    source = row_of(p, s, tile * kKeys + row(), name);
    there = source != nullptr;
    if (!there) source = static_cast<const unsigned char*>(p.cache.data);  // not read
    target = stage + row() * 128;
    if (quarter() == 0) present[row()] = there;
  }
  __device__ void copy(int block) const {
    if (block < kPieces) {
      copy_async_16(target + raw_offset(block), source + block * 64 + quarter() * 16, there);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int piece = quarter() + 4 * i;
        copy_async_16(target + (kBlocks - 1) * kBlockBytes + ((piece ^ (row() % 8)) * 16),
                      source + kRopeOffset + piece * 16, there);
      }
      if (quarter() == 0) copy_async_16(target + kScaleBlock * kBlockBytes, source + kLatent, there);
    }
  }
  __device__ bool all_there() const { return there; }
  __device__ void convert(unsigned char* stage) const {
    copy_async_wait<0>();
    __syncwarp();
    unsigned char* const own = stage + row() * 128;
    uint4 raw[kPieces];
#pragma unroll
    for (int b = 0; b < kPieces; ++b) raw[b] = *reinterpret_cast<const uint4*>(own + raw_offset(b));
    float4 scales{};
    if constexpr (kPacked) scales = *reinterpret_cast<const float4*>(own + kScaleBlock * kBlockBytes);
    __syncwarp();  // all of the row has been read
#pragma unroll
    for (int b = 0; b < kPieces; ++b) {
      uint2 w[4];
      const uint32_t v[4] = {raw[b].x, raw[b].y, raw[b].z, raw[b].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kPacked) {
          const float scale = b / 2 == 0 ? scales.x : b / 2 == 1 ? scales.y : b / 2 == 2 ? scales.z : scales.w;
          w[i] = widen_e4m3(v[i], scale);
        } else {
          w[i] = Operands::widen(v[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<uint4*>(own + b * kBlockBytes + (((2 * quarter() + i) ^ (row() % 8)) * 16)) = {
            w[2 * i].x, w[2 * i].y, w[2 * i + 1].x, w[2 * i + 1].y};
    }
  }
};

// ---- the kernel ----------------------------------------------------------------------------------------------------

/// acc += P V for one lane at a time, without the values of keys that have no weight for it. `values`: address of an
/// ldmatrix of this warp's columns, as in the usual product; `weights`: P in shared memory.
template <class Operands, int kLaneTiles>
__device__ __forceinline__ void careful_product(float (&acc)[kLaneTiles][8][4], const unsigned char* weights,
                                                uint32_t values) {
  const int lane = static_cast<int>(threadIdx.x) % 32, quad = lane % 4;
#pragma unroll
  for (int m = 0; m < kLaneTiles; ++m) {
#pragma unroll 1
    for (int r = 0; r < 16; ++r) {
      const bool own = lane / 4 == r % 8;
      const unsigned char* row = weights + (16 * m + r) * 128;
#pragma unroll 1
      for (int k = 0; k < kKeys / 16; ++k) {
        // What the product's operands hold for this thread: keys 16 k + 2 quad and the next, and eight further.
        const uint32_t low = *reinterpret_cast<const uint32_t*>(row + ((2 * k) ^ (r % 8)) * 16 + 4 * quad),
                       high = *reinterpret_cast<const uint32_t*>(row + ((2 * k + 1) ^ (r % 8)) * 16 + 4 * quad);
        const auto keep = [](uint32_t w) {
          return ((w & 0x7fffu) != 0 ? 0xffffu : 0u) | ((w & 0x7fff0000u) != 0 ? 0xffff0000u : 0u);
        };
        const uint32_t a[4] = {own && r < 8 ? low : 0u, own && r >= 8 ? low : 0u, own && r < 8 ? high : 0u,
                               own && r >= 8 ? high : 0u};
        const uint32_t keep_low = keep(low), keep_high = keep(high);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          uint32_t b[4];
          ldmatrix_x4_trans(b, (values ^ (n << 5)) + k * 16 * 128);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float(&c)[4] = acc[m][2 * n + i];
            float d[4] = {c[0], c[1], c[2], c[3]};
            Operands::multiply(d, a, b[2 * i] & keep_low, b[2 * i + 1] & keep_high);
#pragma unroll
            for (int j = 0; j < 4; ++j) c[j] = own && (r >= 8) == (j >= 2) ? d[j] : c[j];
          }
        }
      }
    }
  }
}

// Grid: lane blocks x parts, lane blocks fastest, so that blocks that share keys run side by side.
template <class C, LatentFormat kFormat, class Operands, class Problem>
__global__ void __launch_bounds__(kThreads, 1)
    absorbed_kernel(const __grid_constant__ Problem p, const __grid_constant__ Schedule schedule) {
  wait_for_stream();
  extern __shared__ __align__(128) unsigned char shared[];
  unsigned char* const weights = shared + C::kQueryBytes + C::kStages * kStageBytes;
  unsigned char* const stages = shared + C::kQueryBytes;
  auto& s = *reinterpret_cast<typename C::Shared*>(shared + C::kTileBytes);
  const int lane_block = static_cast<int>(blockIdx.x) % schedule.lane_blocks,
            part = static_cast<int>(blockIdx.x) / schedule.lane_blocks;
  find_part(p, schedule, part, s.line);
  let_next_start();

  const int tid = static_cast<int>(threadIdx.x), warp = tid / 32, lane = tid % 32, quad = lane % 4;
  const int warp_k = warp / (C::kWarpsM * C::kWarpsN), warp_m = warp / C::kWarpsN % C::kWarpsM,
            warp_n = warp % C::kWarpsN;
  // The lanes of this thread in the softmax: own_row and own_row + 8.
  const int own_row = (warp_m * C::kRowTiles + warp_k) * 16 + lane / 4;
  const float value_scale = kFormat == LatentFormat::kE4m3 ? p.cache.scale : 1.0f;
  const float scale = p.softmax_scale * value_scale * kLog2Of;

  // ldmatrix addresses. A step of 16 columns is an xor of 32, four of them are a block of 64 further. Warps that share
  // columns take every other step.
  const uint32_t stage0 = shared_address(stages);
  uint32_t query_address[C::kRowTiles];  // first the 16 lanes that this warp will softmax
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m)
    query_address[m] = (shared_address(shared) + ((warp_m * C::kRowTiles + (m ^ warp_k)) * 16 + lane % 16) * 128 +
                        ((lane / 16) ^ (lane % 8)) * 16) ^
                       (warp_k << 5);
  const uint32_t key_offset =
      C::kWarpKeys >= 16
          ? ((warp_n * C::kWarpKeys + lane % 8 + lane / 16 * 8) * 128 + ((lane / 8 % 2) ^ (lane % 8)) * 16) ^
                (warp_k << 5)
          : (warp_n * C::kWarpKeys + lane % 8) * 128 + ((lane / 8) ^ (lane % 8)) * 16;
  const uint32_t weight_address = shared_address(weights) + lane % 16 * 128 + ((lane / 16) ^ (lane % 8)) * 16;
  const uint32_t value_offset = warp * kBlockBytes + lane % 16 * 128 + ((lane / 16) ^ (lane % 8)) * 16;

  if (tid == 0) s.line.cut = -1, s.line.cut_parts = 0;
  Walk walk(s.line);
  while (walk.next(p, schedule, s.line, part)) {
    typename Problem::Place g;
    p.place(g, walk.group - 1);
    int lane0 = first_lane_of(p, g, lane_block, C::kLanes);
    int lanes = min(C::kLanes, static_cast<int>(g.num_rows) * p.num_heads - lane0);
    const int most = static_cast<int>(p.keys_of(g, (lane0 + lanes - 1) / p.num_heads));
    const int least = static_cast<int>(p.keys_of(g, lane0 / p.num_heads));
    const int32_t* const list = names_of(g);
    int bound[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int l = own_row + 8 * half;
      bound[half] = l < lanes ? static_cast<int>(p.keys_of(g, (lane0 + l) / p.num_heads)) : 0;
    }
    __syncthreads();  // nobody reads the last piece's queries, tiles or statistics any more
    for (int l = tid / 8; l < C::kLanes; l += kThreads / 8) {
      const int piece = tid % 8;
      const bool ok = l < lanes;
      const int64_t at =
          ok ? (g.first_row + (lane0 + l) / p.num_heads) * p.q_row_stride + (lane0 + l) % p.num_heads * p.q_head_stride
             : 0;
      const int target = l * 128 + ((piece ^ (l % 8)) * 16);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if (Operands::kHalf || p.q_e4m3) {
          const uint2 v = ok ? *reinterpret_cast<const uint2*>(reinterpret_cast<const unsigned char*>(p.q) + at +
                                                               b * 64 + 8 * piece)
                             : uint2{0, 0};
          const uint2 x = Operands::widen(v.x), y = Operands::widen(v.y);
          *reinterpret_cast<uint4*>(shared + b * C::kQueryBlock + target) = {x.x, x.y, y.x, y.y};
        } else {
          copy_async_16(shared_address(shared) + b * C::kQueryBlock + target, p.q + at + b * 64 + 8 * piece, ok);
        }
      }
    }

    float acc[C::kLaneTiles][8][4], top[2], sum[2];
    bool careful = false;
    for (;;) {  // once, or again the careful way
#pragma unroll
      for (int m = 0; m < C::kLaneTiles; ++m)
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (float& x : acc[m][n]) x = 0.0f;
      top[0] = top[1] = -INFINITY;
      sum[0] = sum[1] = 0.0f;
      if (tid < C::kLanes) s.largest[tid] = -INFINITY;

      Loader<kFormat, Operands> loader;
      const int end = min(most, walk.last_tile * kKeys);
      loader.fetch_names(p, schedule, list, walk.first_tile, end);
      loader.begin(p, schedule, walk.first_tile, stage0, s.present[0]);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) loader.copy(b);
      copy_async_commit();
      loader.convert(stages);
      loader.fetch_names(p, schedule, list, walk.first_tile + 1, end);

      for (int tile = walk.first_tile; tile < walk.last_tile; ++tile) {
        const int stage = C::kStages == 1 ? 0 : (tile - walk.first_tile) & 1, other = C::kStages == 1 ? 0 : stage ^ 1;
        const uint32_t keys = stage0 + stage * kStageBytes;
        const bool more = tile + 1 < walk.last_tile;
        copy_async_wait<0>();
        // The tile is there, and nobody reads the one before, or its weights. Most tiles are seen whole by all lanes.
        const bool masked = __syncthreads_or(!loader.all_there()) != 0 || (tile + 1) * kKeys > least;
        // Of the next tile, which beyond the last one is zeros. Its copies are issued between the steps of S.
        const auto begin_next = [&] {
          loader.begin(p, schedule, tile + 1, stage0 + other * kStageBytes, s.present[other]);
          loader.fetch_names(p, schedule, list, tile + 2, end);
        };
        if (C::kStages == 2) begin_next();

        // ---- S ----
        float score[C::kRowTiles][C::kWarpKeys / 8][4] = {};
        if constexpr (C::kWarpKeys >= 16) {
#pragma unroll
          for (int k = 0; k < kWidth / 16 / C::kSplit; ++k) {
            const uint32_t flip = C::kSplit == 2 ? (k & 1) << 6 : (k & 3) << 5;
            const int block = C::kSplit == 2 ? k >> 1 : k >> 2;
            if (C::kStages == 2 && flip == 0) loader.copy(block);
            uint32_t a[C::kRowTiles][4];
#pragma unroll
            for (int m = 0; m < C::kRowTiles; ++m)
              ldmatrix_x4(a[m], (query_address[m] ^ flip) + block * C::kQueryBlock);
#pragma unroll
            for (int n = 0; n < C::kWarpKeys / 16; ++n) {
              uint32_t b[4];
              ldmatrix_x4(b, ((keys + key_offset) ^ flip) + block * kBlockBytes + n * 16 * 128);
#pragma unroll
              for (int m = 0; m < C::kRowTiles; ++m) {
                Operands::multiply(score[m][2 * n], a[m], b[0], b[1]);
                Operands::multiply(score[m][2 * n + 1], a[m], b[2], b[3]);
              }
            }
          }
        } else {  // eight keys: an ldmatrix serves two steps
#pragma unroll
          for (int k = 0; k < kWidth / 32; ++k) {
            if (C::kStages == 2 && k % 2 == 0) loader.copy(k / 2);
            uint32_t a[4], b[4];
            ldmatrix_x4(b, ((keys + key_offset) ^ ((k & 1) << 6)) + (k >> 1) * kBlockBytes);
            ldmatrix_x4(a, (query_address[0] ^ ((k & 1) << 6)) + (k >> 1) * C::kQueryBlock);
            Operands::multiply(score[0][0], a, b[0], b[1]);
            ldmatrix_x4(a, (query_address[0] ^ ((k & 1) << 6) ^ 32) + (k >> 1) * C::kQueryBlock);
            Operands::multiply(score[0][0], a, b[2], b[3]);
          }
        }
        copy_async_commit();
        constexpr int kGroups = C::kWarpKeys / 8;
        float x[kGroups][4];
        if constexpr (C::kSplit == 2) {
          constexpr int kSlotBytes = kGroups * 512;
          // Rows that are to be converted leave the first blocks of the next tile's stage free; where there are none, P
          // of the tile before is, and after S the tile's rotated columns.
          constexpr bool kRoom = Loader<kFormat, Operands>::kConverts && C::kStages == 2;
          if constexpr (!kRoom) __syncthreads();  // nobody reads the rotated columns any more
          const auto slot = [&](int w) {
            unsigned char* base = stages + other * kStageBytes + w * kSlotBytes;
            if constexpr (kRoom)
              static_assert(kWarps * kSlotBytes <= Loader<kFormat, Operands>::kScaleBlock * kBlockBytes);
            else if (w < kWarps / 2) base = weights + w * kSlotBytes;
            else base = stages + stage * kStageBytes + (kBlocks - 1) * kBlockBytes + w % (kWarps / 2) * kSlotBytes;
            return reinterpret_cast<float4*>(base) + lane;
          };
#pragma unroll
          for (int j = 0; j < kGroups; ++j)
            slot(warp)[32 * j] = {score[1][j][0], score[1][j][1], score[1][j][2], score[1][j][3]};
          warps_barrier<2>(1 + warp % (kWarps / 2));
#pragma unroll
          for (int j = 0; j < kGroups; ++j) {
            const float4 from = slot(warp ^ (kWarps / 2))[32 * j];
            x[j][0] = score[0][j][0] + from.x;
            x[j][1] = score[0][j][1] + from.y;
            x[j][2] = score[0][j][2] + from.z;
            x[j][3] = score[0][j][3] + from.w;
          }
        } else {
#pragma unroll
          for (int j = 0; j < kGroups; ++j)
#pragma unroll
            for (int i = 0; i < 4; ++i) x[j][i] = score[0][j][i];
        }

        // ---- softmax of lanes own_row and own_row + 8 over the keys of warp_n ----
        if (masked) {
          const int first_key = warp_n * C::kWarpKeys + 2 * quad;
#pragma unroll
          for (int j = 0; j < kGroups; ++j) {
            const uint32_t present = *reinterpret_cast<const uint16_t*>(&s.present[stage][first_key + 8 * j]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const bool sees =
                  (present >> (8 * (i % 2)) & 1u) != 0 && tile * kKeys + first_key + 8 * j + i % 2 < bound[i / 2];
              x[j][i] = sees ? x[j][i] : -INFINITY;
            }
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float m = fmaxf(x[0][2 * half], x[0][2 * half + 1]);  // passes NaN by; it comes back through the weights
#pragma unroll
          for (int j = 1; j < kGroups; ++j) m = fmaxf(m, fmaxf(x[j][2 * half], x[j][2 * half + 1]));
          m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
          m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
          if (quad == 0) s.max[warp_n][own_row + 8 * half] = m;
        }
        // The warps of these lanes have their maxima, and have read the sums that lay in the place of their weights.
        warps_barrier<kWarps / C::kWarpsM>(1 + kWarps / 2 + warp_m);
        bool changed = false;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = own_row + 8 * half;
          float m = s.max[0][row];
#pragma unroll
          for (int n = 1; n < C::kWarpsN; ++n) m = fmaxf(m, s.max[n][row]);
          m = isnan(m) ? -INFINITY : m * scale;
          // What is subtracted from scores follows their maximum in steps, so that O is rarely scaled.
          const float before = top[half];
          if (m > before + kSlack) top[half] = m;
          // Scores of -inf alone give weights of 0, not NaN.
          const float shift = top[half] == -INFINITY ? 0.0f : top[half] - Operands::kLift;
          const float factor = before == top[half] ? 1.0f : exp2_approx(before - top[half]);
          changed |= factor != 1.0f;
          if (warp_n == 0 && quad == 0) {
            s.rescale[row] = factor;
            if (p.max_logits != nullptr) s.largest[row] = fmaxf(s.largest[row], m);
          }
          float own = 0.0f;
#pragma unroll
          for (int j = 0; j < kGroups; ++j) {
            const float w0 = exp2_approx(fmaf(x[j][2 * half], scale, -shift));
            const float w1 = exp2_approx(fmaf(x[j][2 * half + 1], scale, -shift));
            const uint32_t pair = Operands::round(w0, w1);
            own += w0 + w1;  // not the rounded ones, over which an LSE of few keys would be off by 2^-9
            const int piece = warp_n * kGroups + j;
            *reinterpret_cast<uint32_t*>(weights + row * 128 + (piece ^ (row % 8)) * 16 + 4 * quad) = pair;
          }
          sum[half] = sum[half] * factor + own;
        }
        changed = __syncthreads_or(changed) != 0;

        // ---- O: all lanes, 64 columns; converting the next tile before or behind it: warps i and i + 4 share a
        // quarter of the multiprocessor, and one converts while the other multiplies ----
        const auto convert_next = [&] {
          if (more) loader.convert(stages + other * kStageBytes);
        };
        if (Loader<kFormat, Operands>::kConverts && C::kStages == 2 && warp < kWarps / 2) convert_next();
        if (changed) {
#pragma unroll
          for (int m = 0; m < C::kLaneTiles; ++m) {
            const float low = s.rescale[16 * m + lane / 4], high = s.rescale[16 * m + lane / 4 + 8];
#pragma unroll
            for (int n = 0; n < 8; ++n) {
              acc[m][n][0] *= low;
              acc[m][n][1] *= low;
              acc[m][n][2] *= high;
              acc[m][n][3] *= high;
            }
          }
        }
        if (!careful) {
#pragma unroll
          for (int k = 0; k < kKeys / 16; ++k) {
            uint32_t a[C::kLaneTiles][4];
#pragma unroll
            for (int m = 0; m < C::kLaneTiles; ++m) ldmatrix_x4(a[m], (weight_address ^ (k << 5)) + m * 16 * 128);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
              uint32_t b[4];
              ldmatrix_x4_trans(b, ((keys + value_offset) ^ (n << 5)) + k * 16 * 128);
#pragma unroll
              for (int m = 0; m < C::kLaneTiles; ++m) {
                Operands::multiply(acc[m][2 * n], a[m], b[0], b[1]);
                Operands::multiply(acc[m][2 * n + 1], a[m], b[2], b[3]);
              }
            }
          }
        } else {
          careful_product<Operands>(acc, weights, keys + value_offset);
        }
        if (Loader<kFormat, Operands>::kConverts && C::kStages == 2 && warp >= kWarps / 2) convert_next();
        if constexpr (C::kStages == 1) {
          __syncthreads();
          begin_next();
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) loader.copy(b);
          copy_async_commit();
          convert_next();
        }
      }
      copy_async_wait<0>();

      float seen = 0.0f;  // seen + 0 * x: 0 as long as all of them are finite
#pragma unroll
      for (int m = 0; m < C::kLaneTiles; ++m)
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) seen = fmaf(acc[m][n][i], 0.0f, seen);
      if (__syncthreads_or(seen != 0.0f) == 0 || careful) break;
      careful = true;
    }

    // ---- results ----
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
      if (quad == 0) {
        s.sum[warp_n][own_row + 8 * half] = sum[half];
        if (warp_n == 0) s.top[own_row + 8 * half] = top[half] - Operands::kLift;
      }
    }
    __syncthreads();
    p.place(g, walk.group - 1);  // again, rather than kept in registers through the loop
    lane0 = first_lane_of(p, g, lane_block, C::kLanes);
    lanes = min(C::kLanes, static_cast<int>(g.num_rows) * p.num_heads - lane0);
    const bool complete = walk.first_tile == 0 && walk.last_tile == walk.tiles;
#pragma unroll
    for (int m = 0; m < C::kLaneTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int l = 16 * m + lane / 4 + 8 * half;
        if (l >= lanes) continue;
        float total = 0.0f;
#pragma unroll
        for (int n = 0; n < C::kWarpsN; ++n) total += s.sum[n][l];
        const float shift = s.top[l];
        const bool empty = total == 0.0f;  // no keys, or none with a weight
        const int64_t row = g.first_row + (lane0 + l) / p.num_heads;
        const int head = (lane0 + l) % p.num_heads;
        const float lse = empty ? -INFINITY : (shift + log2f(total)) * kLnOf;
        const bool first = warp == 0 && quad == 0;
        if (complete) {
          const float all = p.sink != nullptr && !empty ? total + exp2_approx(p.sink[head] * kLog2Of - shift) : total;
          const float inverse = value_scale / all;
          const int64_t at = row * p.out_row_stride + head * p.out_head_stride + warp * 64 + 2 * quad;
#pragma unroll
          for (int n = 0; n < 8; ++n) {
            const float x0 = empty ? 0.0f : acc[m][n][2 * half] * inverse,
                        x1 = empty ? 0.0f : acc[m][n][2 * half + 1] * inverse;
            if (p.out_dtype == DType::kBf16)
              *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + at + 8 * n) = round_to_bf16x2(x0, x1);
            else *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at + 8 * n) = {x0, x1};
          }
          if (first && p.lse != nullptr) p.lse[row * p.lse_row_stride + head] = lse;
          if (first && p.max_logits != nullptr) p.max_logits[row * p.max_row_stride + head] = s.largest[l] * kLnOf;
        } else {
          const float inverse = value_scale / total;
          const int64_t index =
              ((2 * int64_t{part} + (walk.first_tile == 0)) * schedule.lane_blocks + lane_block) * C::kLanes + l;
          float* partial = p.partial + index * kLatent + warp * 64 + 2 * quad;
#pragma unroll
          for (int n = 0; n < 8; ++n)
            *reinterpret_cast<float2*>(partial + 8 * n) = {acc[m][n][2 * half] * inverse,
                                                           acc[m][n][2 * half + 1] * inverse};
          if (first) {
            p.partial_lse[index] = lse;  // -inf: the partial result is not read
            schedule.partial_max[index] = s.largest[l] * kLnOf;
          }
        }
      }
    if (tid == 0 && walk.first_tile == 0 && walk.last_tile < walk.tiles) {
      s.line.cut = walk.group - 1;
      s.line.cut_parts = 1 + (walk.tiles - walk.last_tile + s.line.payload - 1) / s.line.payload;
    }
  }
  if (tid == 0 && lane_block == 0) {
    schedule.cut_group[part] = s.line.cut;
    schedule.cut_parts[part] = s.line.cut_parts;
  }
}

constexpr int kMaxParts = 256;
constexpr int kCombineLanes = 4, kWarpsPerLane = 4, kCombineThreads = 32 * kCombineLanes * kWarpsPerLane;

/// Merges the parts of the groups that were cut. Grid: parts x lane blocks x (kLanes / kCombineLanes); a block serves
/// kCombineLanes lanes of the group that begins in its part and goes on behind it, if there is one: kWarpsPerLane warps
/// take every fourth part each, and their sums are added in order.
template <int kLanes, class Problem>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ Problem p, const __grid_constant__ Schedule schedule) {
  wait_for_stream();
  let_next_start();
  constexpr int kPieces = kLatent / 128;  // a warp reads 128 columns at once
  static_assert(kPieces == kWarpsPerLane, "a warp finishes 128 columns");
  __shared__ float weight[kCombineLanes][kMaxParts];
  __shared__ float4 sums[kCombineLanes][kWarpsPerLane][kPieces][32];
  constexpr int kBlocksPerPart = kLanes / kCombineLanes;
  const int per_part = kBlocksPerPart * schedule.lane_blocks;
  const int first = static_cast<int>(blockIdx.x) / per_part;
  const int group = schedule.cut_group[first];
  if (group < 0) return;
  const int parts = schedule.cut_parts[first];
  typename Problem::Place g;
  p.place(g, group);
  const int warp = static_cast<int>(threadIdx.x) / 32, in_warp = static_cast<int>(threadIdx.x) % 32,
            slot = warp / kWarpsPerLane, quarter = warp % kWarpsPerLane;
  const int lane = static_cast<int>(blockIdx.x) % per_part * kCombineLanes + slot;
  const int in_group = first_lane_of(p, g, 0, kLanes) + lane;
  const bool real = in_group < static_cast<int>(g.num_rows) * p.num_heads;
  auto index_of = [&](int i) {
    return ((int64_t{2} * (first + i) + (i == 0)) * schedule.lane_blocks + lane / kLanes) * kLanes + lane % kLanes;
  };
  float top = -INFINITY, largest = -INFINITY;  // every warp of a lane finds them for itself
  if (real) {
    for (int i = in_warp; i < parts; i += 32) {
      const float l = p.partial_lse[index_of(i)];
      if (quarter == 0) weight[slot][i] = l;
      top = l > top || isnan(l) ? l : top;
      largest = fmaxf(largest, schedule.partial_max[index_of(i)]);
    }
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, top, offset);
    top = other > top || isnan(other) ? other : top;
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  __syncthreads();
  float sum = 0.0f;
  float4 o[kPieces] = {};
  if (real) {
    for (int i = 0; i < parts; ++i) {
      const float l = weight[slot][i];
      sum += l == -INFINITY ? 0.0f : __expf(l - top);
    }
#pragma unroll 4
    for (int i = quarter; i < parts; i += kWarpsPerLane) {
      const float l = weight[slot][i];
      if (l == -INFINITY) continue;  // an empty piece is not read
      const float w = __expf(l - top);
      const float4* row = reinterpret_cast<const float4*>(p.partial + index_of(i) * kLatent) + in_warp;
#pragma unroll
      for (int c = 0; c < kPieces; ++c) {
        const float4 x = row[32 * c];
        o[c].x = fmaf(w, x.x, o[c].x), o[c].y = fmaf(w, x.y, o[c].y), o[c].z = fmaf(w, x.z, o[c].z),
        o[c].w = fmaf(w, x.w, o[c].w);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kPieces; ++c) sums[slot][quarter][c][in_warp] = o[c];
  __syncthreads();
  if (!real) return;
  float4 total = sums[slot][0][quarter][in_warp];
  for (int w = 1; w < kWarpsPerLane; ++w) {
    const float4 x = sums[slot][w][quarter][in_warp];
    total.x += x.x, total.y += x.y, total.z += x.z, total.w += x.w;
  }
  const int64_t row = g.first_row + in_group / p.num_heads;
  const int head = in_group % p.num_heads;
  const float all = p.sink != nullptr && sum != 0.0f ? sum + __expf(p.sink[head] - top) : sum;
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / all;
  total.x *= inverse, total.y *= inverse, total.z *= inverse, total.w *= inverse;
  const int64_t at = row * p.out_row_stride + head * p.out_head_stride + 128 * quarter + 4 * in_warp;
  if (p.out_dtype == DType::kBf16)
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at) = {round_to_bf16x2(total.x, total.y),
                                                                     round_to_bf16x2(total.z, total.w)};
  else *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = total;
  if (quarter == 0 && in_warp == 0) {
    if (p.lse != nullptr) p.lse[row * p.lse_row_stride + head] = sum == 0.0f ? -INFINITY : top + logf(sum);
    if (p.max_logits != nullptr) p.max_logits[row * p.max_row_stride + head] = largest;
  }
}

}  // namespace mma
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
