// Index logits on Hopper, e4m3 queries over e4m3 keys through wgmma:
//   logit(t, s) = scale(s) * sum over heads h of w(t, h) * relu(q(t, h) . k(s))
//
// Shapes and cost, 64 heads of 128. A (row, key) is 8,192 products: 2 cycles of a multiprocessor's tensor cores at the
// fp8 rate (4,096 a cycle). relu and weight are 2 instructions a product sum, 64 of them a (row, key): 4 warp
// instructions, one cycle of the four schedulers. So the tensor cores are the bound if the two overlap, and that is
// what the kernel is built for. At 1.7 GHz: 112 G (row, key) a second, 1,840 TFLOP/s; power allows some 1,400. Decode
// with one row reads 132 bytes and writes 4 for each: 4.4 TB/s are 33 G a second, bound by memory with room for two
// rows.
//
// Roles. 16 warps, four warpgroups, all alike. A warpgroup takes tiles of 64 keys as M; a warp's 16 keys of it come by
// cp.async into a ring of its own (three stages of 2 KB), so warps never wait for each other but in wgmma itself. Keys
// go to registers once (16 a thread) and stay there as the A operand for all rows of the unit; queries are B in shared
// memory, e4m3 as they are, 128 columns at a time: two rows of 64 heads or four of 32. 64 accumulators a thread, so
// that 512 threads fit 128 registers each. While one warpgroup waits for its products the other three do relu and
// weights; no double buffer within a warpgroup.
//
// Operand order. K is permuted in both operands alike. Of a key a thread (lane % 4 = t) holds the 16 bytes
// [64 c + 16 t, + 16) for c = 0, 1; a step of 32 takes two words of each. In a head's 128 bytes of B the words
// therefore lie so that word j of piece (c, t) is at byte 32 (2 c + j / 2) + 16 (j % 2) + 4 t. Rows of B are 128 bytes
// in the 128-byte swizzle: 16-byte piece i of column n at i ^ (n % 8). Accumulator (key g of 16, head 8 n + 2 t): a
// thread has a quarter of the heads of two keys. Partial sums of the four lanes are exchanged so that each lane ends
// with another (row, key): three shuffles for two rows.
//
// Precision. Products are exact, but the fp8 tensor cores of Hopper add them with 13 bits or so behind the leading bit
// of the largest term, not in fp32 (tolerances.h). Sets without that: cuda_mma, cuda_generic.
//
// Shared memory: rings 16 * 3 * (2,048 + 64) bytes = 99 KB; queries 8 KB a row of 64 heads, eight rows: 64 KB; weights.
// Units, schedule, determinism: index_units.cuh, and as cuda/mma/indexer.cuh says.
//
// Prediction for H200: prefill 1,000 TFLOP/s; decode as DeepGEMM, 4.0 TB/s for one row, 3.5 for two; batch 1 of 4,096
// keys 6 us.
#pragma once

#include "cuda/common/index_units.cuh"
#include "cuda/common/wgmma.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace sm90 {
namespace indexer {

using namespace index_units;

constexpr int kWarps = 16, kThreads = 32 * kWarps, kWarpgroups = kWarps / 4;
constexpr int kStages = 3;
constexpr int kDim = 128;
constexpr int kWarpKeys = 16;  // of a tile
constexpr int kKeyBytes = kWarpKeys * kDim;
constexpr int kStageBytes = kKeyBytes + 4 * kWarpKeys;  // values, then scales
constexpr int kColumns = 128;                           // of B in one product
constexpr int kMaxSlots = 16;                           // rows of queries in shared memory
constexpr int kAlignment = 1024;                        // of a swizzled block

/// Stands for the scale of a key whose page is outside the pool: a NaN that no arithmetic makes.
constexpr uint32_t kNoPage = 0xffc0deadu;

/// Heads are padded to kHeads: 32 or 64.
template <int kHeads_>
struct Config {
  static constexpr int kHeads = kHeads_;
  static constexpr int kRowsPerStep = kColumns / kHeads;
  static constexpr int kSlotBytes = kHeads * kDim;
  static constexpr int kSlots = 8 * 64 / kHeads;
  /// A step may read rows behind the last slot, whose results go nowhere.
  __host__ __device__ static constexpr int padded(int slots) { return slots + kRowsPerStep - 1; }
  static constexpr size_t shared_bytes(int slots) {
    return kAlignment + static_cast<size_t>(padded(slots)) * (kSlotBytes + 4 * kHeads) +
           static_cast<size_t>(kWarps) * kStages * kStageBytes;
  }
};

/// d[64 x 64] = (accumulate ? d : 0) + a[64 x 32] b[64 x 32]^T of e4m3 values: a in registers, b K-major in shared
/// memory.
__device__ inline void wgmma_e4m3(float (&d)[32], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

/// d[64 x 128] = (accumulate ? d : 0) + a[64 x 32] b[128 x 32]^T of e4m3 values: a in registers, b K-major in shared
/// memory.
__device__ inline void wgmma_e4m3(float (&d)[64], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

/// 4 bytes from global to shared memory.
__device__ inline void copy_async_4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}

/// max(x, 0), NaN for NaN.
__device__ inline float relu(float x) {
  asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(x));
  return x;
}

/// Where the rows of a step go: row r of it is `logits` + r * stride, columns below bound[r].
struct Target {
  const LogitBlock& block;
  int64_t first_row;      // of the step, in the block
  int first_key;          // of the warp
  const int32_t* bounds;  // of the step's rows
  int num_rows;
};

__device__ inline void store_logit(const Target& to, int row, int key, float sum, float scale) {
  if (row >= to.num_rows || to.first_key + key >= to.bounds[row]) return;
  // A page outside the pool cannot be scored: the lowest rank, so that it is never preferred to a real key.
  const float logit = __float_as_uint(scale) == kNoPage ? -INFINITY : sum * scale;
  const int64_t at = (to.first_row + row) * to.block.stride + to.first_key + key;
  if (to.block.bf16) static_cast<uint16_t*>(to.block.logits)[at] = float_to_bf16(logit);
  else static_cast<float*>(to.block.logits)[at] = logit;
}

/// Products of the warpgroup's 64 keys with kN columns of B (rows of queries one after the other), relu, weights, and
/// the sums of the warp's 16 keys to memory.
template <int kHeads, int kN>
__device__ inline void score(const uint32_t (&keys)[kDim / 32][4], uint64_t queries, const float4* weights,
                             const float (&scale)[2], const Target& to) {
  constexpr int kRows = kN / kHeads, kPairs = kHeads / 16;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float acc[kN / 2];
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDim / 32; ++k) wgmma_e4m3(acc, keys[k], queries + (32 * k >> 4), k > 0);
  wgmma_commit();
  wgmma_wait<0>();
  float sum[kRows][2];  // of keys g and g + 8 over this thread's heads
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const float4 w = weights[(r * kPairs + n) * 4 + t];  // heads 16 n + 2 t, + 1, + 8, + 9
      const float* a = acc + (r * kPairs + n) * 8;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float x = relu(a[2 * h]);
        float s = n == 0 ? w.x * x : fmaf(w.x, x, sum[r][h]);
        s = fmaf(w.y, relu(a[2 * h + 1]), s);
        s = fmaf(w.z, relu(a[4 + 2 * h]), s);
        sum[r][h] = fmaf(w.w, relu(a[5 + 2 * h]), s);
      }
    }
  }
  // The sums of four lanes, always as (t + t^2) + (t^1 + t^3): the same bits in whichever lane they end.
  constexpr uint32_t kAll = 0xffffffffu;
  const bool high = (t & 2) != 0, odd = (t & 1) != 0;
  if constexpr (kRows == 1) {
    float both[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) both[h] = sum[0][h] + __shfl_xor_sync(kAll, sum[0][h], 2);
    const float all = (odd ? both[1] : both[0]) + __shfl_xor_sync(kAll, odd ? both[0] : both[1], 1);
    if (!high) store_logit(to, 0, odd ? g + 8 : g, all, odd ? scale[1] : scale[0]);
  } else if constexpr (kRows == 2) {
    float both[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      both[h] = (high ? sum[1][h] : sum[0][h]) + __shfl_xor_sync(kAll, high ? sum[0][h] : sum[1][h], 2);
    const float all = (odd ? both[1] : both[0]) + __shfl_xor_sync(kAll, odd ? both[0] : both[1], 1);
    store_logit(to, t / 2, odd ? g + 8 : g, all, odd ? scale[1] : scale[0]);
  } else {
    static_assert(kRows == 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float both[2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        both[r] = (high ? sum[r + 2][h] : sum[r][h]) + __shfl_xor_sync(kAll, high ? sum[r][h] : sum[r + 2][h], 2);
      const float all = (odd ? both[1] : both[0]) + __shfl_xor_sync(kAll, odd ? both[0] : both[1], 1);
      store_logit(to, t, g + 8 * h, all, scale[h]);
    }
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, 1) index_logits_kernel(const __grid_constant__ Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ unsigned char shared[];
  __shared__ Schedule<kWarps, kMaxSlots> schedule;
  const int slots = p.rows_per_unit * p.units_per_phase;
  const uint32_t base = shared_address(shared), queries = (base + kAlignment - 1) / kAlignment * kAlignment;
  auto* const query_bytes = shared + (queries - base);  // [slot][head][128] swizzled
  auto* const weights =
      reinterpret_cast<float*>(query_bytes + C::padded(slots) * C::kSlotBytes);  // [slot][head pair][t][4]
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, warpgroup = warp / 4;
  const int g = lane / 4, t = lane % 4;
  const uint32_t ring = shared_address(weights + C::padded(slots) * C::kHeads) + warp * kStages * kStageBytes;

  int64_t begin, end;
  if (!schedule.find_stretch(p, begin, end)) return;

  const auto* pool = static_cast<const unsigned char*>(p.cache.data);
  const int64_t to_scales = int64_t{p.cache.page_size} * kDim;  // from the start of a page
  const bool keys_in_page = p.cache.page_size % kWarpKeys == 0;
  // Copies: a step of the warp takes four keys. Odd keys have their halves swapped, so that eight lanes that read two
  // keys below meet all banks.
  const int copy_key = lane / 8;
  const uint32_t copy_to = copy_key * kDim + ((lane % 8) ^ (copy_key % 2 * 4)) * 16;
  const int read_swap = g % 2 * 4;

  for (;;) {
    schedule.next_phase(p, begin, end);
    const bool last_phase = schedule.last_phase(p, end);
    const Part* const parts = schedule.parts;
    // A warpgroup's item is a tile with all rows of the unit; with some of them in a phase of so few tiles that the
    // last round of the warpgroups would weigh.
    const int num_tiles = schedule.num_tiles(p);
    const int steps = (p.rows_per_unit + C::kRowsPerStep - 1) / C::kRowsPerStep;
    const int steps_per_item = num_tiles >= 8 * kWarpgroups   ? steps
                               : num_tiles >= 2 * kWarpgroups ? (steps + 1) / 2
                                                              : 1;
    const int items_per_tile = (steps + steps_per_item - 1) / steps_per_item;
    const int num_items = num_tiles * items_per_tile;

    // Starts the copies of this warp's keys of an item into a stage of its ring.
    auto start_item = [&](int item, int stage_index) {
      if (item < num_items) {
        const uint32_t stage = ring + stage_index * kStageBytes;
        const int i = item / items_per_tile;
        const Part& part = parts[schedule.part_of(i)];
        const int first_key = (part.first_tile + i - part.begin) * kTileKeys + warp % 4 * kWarpKeys;
        const int count = part.keys - first_key;  // that anybody sees; may be 0 and less
        if (keys_in_page) {
          const int64_t page = count > 0 ? part.page_ids[first_key / p.cache.page_size] : -1;
          const int64_t offset = first_key % p.cache.page_size;
          const bool known = page >= 0 && page < p.cache.num_pages;
          const unsigned char* from = pool + (known ? page : 0) * p.cache.page_stride_bytes;
          const unsigned char* source = from + offset * kDim + lane * 16;
#pragma unroll
          for (int s = 0; s < kWarpKeys / 4; ++s)
            copy_async_16(stage + copy_to + 512 * s, source + 512 * s, known && 4 * s + copy_key < count);
          if (lane < kWarpKeys) {
            const uint32_t to = stage + kKeyBytes + 4 * lane;
            if (known && lane < count) copy_async_4(to, from + to_scales + 4 * (offset + lane));
            else asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(kNoPage) : "memory");
          }
        } else {
          const int position = first_key + lane;
          const int64_t page = lane < kWarpKeys && lane < count ? part.page_ids[position / p.cache.page_size] : -1;
          const int64_t offset = position % p.cache.page_size;
          const bool known = page >= 0 && page < p.cache.num_pages;
          const unsigned char* from = pool + (known ? page : 0) * p.cache.page_stride_bytes;
          const unsigned char* value = known ? from + offset * kDim : nullptr;
#pragma unroll
          for (int s = 0; s < kWarpKeys / 4; ++s) {
            const auto source = reinterpret_cast<const unsigned char*>(
                __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(value), 4 * s + copy_key));
            copy_async_16(stage + copy_to + 512 * s, source != nullptr ? source + lane % 8 * 16 : pool,
                          source != nullptr);
          }
          if (lane < kWarpKeys) {
            const uint32_t to = stage + kKeyBytes + 4 * lane;
            if (known) copy_async_4(to, from + to_scales + 4 * offset);
            else asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(kNoPage) : "memory");
          }
        }
      }
      copy_async_commit();
    };
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) start_item(warpgroup + s * kWarpgroups, s);

    // ---- queries and weights of the phase ----
    for (int i = tid; i < slots * C::kHeads * (kDim / 16); i += kThreads) {
      const int piece = i % (kDim / 16), h = i / (kDim / 16) % C::kHeads, slot = i / (kDim / 16 * C::kHeads);
      const Part& part = parts[slot / p.rows_per_unit];
      if (slot % p.rows_per_unit >= part.num_rows) continue;
      const int64_t row = part.first_row + slot % p.rows_per_unit;
      const uint4 v = h < p.num_heads
                          ? *reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(p.q) + row * p.q_row_stride +
                                                            h * p.q_head_stride + 16 * piece)
                          : uint4{0, 0, 0, 0};
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
      unsigned char* to = query_bytes + slot * C::kSlotBytes + h * kDim + piece % 4 * 4;
#pragma unroll
      for (int j = 0; j < 4; ++j)  // byte 32 (2 c + j / 2) + 16 (j % 2) of the head: its piece 4 c + j
        *reinterpret_cast<uint32_t*>(to + (((piece / 4 * 4 + j) ^ (h % 8)) * 16)) = words[j];
    }
    for (int i = tid; i < slots * C::kHeads; i += kThreads) {
      const int h = i % C::kHeads, slot = i / C::kHeads;
      const Part& part = parts[slot / p.rows_per_unit];
      if (slot % p.rows_per_unit >= part.num_rows) continue;
      const int64_t row = part.first_row + slot % p.rows_per_unit;
      weights[slot * C::kHeads + h / 16 * 16 + h % 8 / 2 * 4 + h / 8 % 2 * 2 + h % 2] =
          h < p.num_heads ? p.weights[row * p.weights_stride + h] : 0.0f;
    }
    fence_async_shared();  // wgmma reads what was stored here
    __syncthreads();

    // ---- items ----
    int stage_index = 0;
#pragma unroll 1
    for (int item = warpgroup; item < num_items; item += kWarpgroups) {
      const int i = item / items_per_tile, e = schedule.part_of(i);
      const int tile_key = (parts[e].first_tile + i - parts[e].begin) * kTileKeys;
      const uint32_t stage = ring + stage_index * kStageBytes;
      copy_async_wait<kStages - 2>();
      __syncwarp();
      uint32_t keys[kDim / 32][4];  // A of each step: key g, key g + 8, then the same four values of K further on
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const uint32_t at = stage + (8 * h + g) * kDim + ((4 * c + t) ^ read_swap) * 16;
          asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                       : "=r"(keys[2 * c][h]), "=r"(keys[2 * c][2 + h]), "=r"(keys[2 * c + 1][h]),
                         "=r"(keys[2 * c + 1][2 + h])
                       : "r"(at)
                       : "memory");
        }
      float scale[2];
#pragma unroll
      for (int h = 0; h < 2; ++h)
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(scale[h]) : "r"(stage + kKeyBytes + 4 * (8 * h + g)) : "memory");
      __syncwarp();
      // The stage that the item before this one was read from.
      start_item(item + (kStages - 1) * kWarpgroups, stage_index == 0 ? kStages - 1 : stage_index - 1);
      stage_index = stage_index == kStages - 1 ? 0 : stage_index + 1;

      const int first = item % items_per_tile * steps_per_item * C::kRowsPerStep;
      const int last = min(first + steps_per_item * C::kRowsPerStep, parts[e].num_rows);
#pragma unroll 1
      for (int r = first; r < last; r += C::kRowsPerStep) {
        const int slot = e * p.rows_per_unit + r, rows = min(C::kRowsPerStep, last - r);
        if (schedule.bounds[slot + rows - 1] <= tile_key) continue;  // later rows see no less: nobody sees the tile
        const Target to{p.block, parts[e].first_row + r - p.block.first_row, tile_key + warp % 4 * kWarpKeys,
                        schedule.bounds + slot, rows};
        const uint64_t b = k_major(queries + slot * C::kSlotBytes);
        const auto* w = reinterpret_cast<const float4*>(weights + slot * C::kHeads);
        if (rows * C::kHeads > kColumns / 2) score<C::kHeads, kColumns>(keys, b, w, scale, to);
        else score<C::kHeads, kColumns / 2>(keys, b, w, scale, to);
      }
    }
    if (last_phase) return;
  }
#endif
}

}  // namespace indexer
}  // namespace sm90
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
