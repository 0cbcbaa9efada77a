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
// Roles. 16 warps, four warpgroups, all alike. A warpgroup takes tiles of 64 keys as M from a ring of its own (four
// stages of 8,448 bytes); its warps take turns in filling it, by bulk copies (cp.async where pages hold no run of 16
// keys), three items ahead, and look up the page after that. So the price of finding a tile is paid by one warp of
// four. Keys go to registers once (16 a thread) and stay there as the A operand for all rows of the unit; queries are B
// in shared memory, e4m3 as they are, 64 columns at a time: a row of 64 heads or two of 32. Two sets of 32 accumulators
// a thread: the products of a step run under relu and weights of the one before, four steps unrolled, since ptxas waits
// for products that are under way across a branch. 512 threads of 128 registers.
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
// Shared memory: rings 4 * 4 * 8,448 bytes = 132 KB; queries 8 KB a row of 64 heads, eight rows: 64 KB; weights.
// Units, schedule, determinism: index_units.cuh, and as cuda/mma/indexer.cuh says.
//
// What was tried on an H200 stands in docs/kernels/indexer_cuda.md.
#pragma once

#include <type_traits>

#include "cuda/common/index_units.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/wgmma.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace sm90 {
namespace indexer {

using namespace index_units;

constexpr int kWarps = 16, kThreads = 32 * kWarps, kWarpgroups = kWarps / 4;
constexpr int kStages = 4;  // a power of two; a warpgroup's warps fill them in turn
constexpr int kAhead = 3;   // items between a copy and its use
constexpr int kDim = 128;
constexpr int kWarpKeys = 16;  // of a tile
constexpr int kKeyBytes = kTileKeys * kDim;
constexpr int kStageBytes = kKeyBytes + 4 * kTileKeys;  // values, then scales
constexpr int kColumns = 64;                            // of B in one product
constexpr int kMaxSlots = 16;                           // rows of queries in shared memory
constexpr int kAlignment = 1024;                        // of a swizzled block

/// Stands for the scale of a key whose page is outside the pool: a NaN that no arithmetic makes.
constexpr uint32_t kNoPage = 0xffc0deadu;

/// Heads are padded to kHeads: 32 or 64.
template <int kHeads_>
struct Config {
  static constexpr int kHeads = kHeads_;
  static constexpr int kRowsPerStep = kColumns / kHeads;
  static constexpr int kRowsPerItem = 2 * kRowsPerStep;  // at least, where tiles are cut by rows
  static constexpr int kSlotBytes = kHeads * kDim;
  static constexpr int kSlots = 8 * 64 / kHeads;
  /// A step may read rows behind the last slot, whose results go nowhere.
  __host__ __device__ static constexpr int padded(int slots) { return slots + kRowsPerStep - 1; }
  static constexpr size_t shared_bytes(int slots) {
    return kAlignment + static_cast<size_t>(padded(slots)) * (kSlotBytes + 4 * kHeads) +
           static_cast<size_t>(kWarpgroups) * kStages * kStageBytes;
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

/// 4 bytes from global to shared memory.
__device__ inline void copy_async_4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}
/// A run of bytes from global to shared memory by the copy engine, which then counts them on the barrier. Addresses and
/// size are multiples of 16.
__device__ inline void copy_bulk(uint32_t shared, const void* global, int bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
/// Arrives, and tells the barrier how many bytes will come.
__device__ inline void arrive_expecting(uint64_t* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

/// max(x, 0), NaN for NaN.
__device__ inline float relu(float x) {
  asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(x));
  return x;
}

/// Waits until at most kPending groups of products are under way; `acc` is of one that is not, and is not read before.
template <int kPending>
__device__ inline void wait_for(float (&acc)[kColumns / 2]) {
  wgmma_wait<kPending>();
#pragma unroll
  for (float& x : acc) asm volatile("" : "+f"(x)::"memory");
}

/// Starts the products of the warpgroup's 64 keys with 64 columns of B.
__device__ inline void start_products(float (&acc)[kColumns / 2], const uint32_t (&keys)[kDim / 32][4],
                                      uint64_t queries) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kDim / 32; ++k) wgmma_e4m3(acc, keys[k], queries + (32 * k >> 4), k > 0);
  wgmma_commit();
}

/// relu, weights and the sum over this thread's heads: of each row of the step the keys g and g + 8.
template <int kHeads>
__device__ inline void reduce_heads(float (&sum)[kColumns / kHeads][2], const float (&acc)[kColumns / 2],
                                    const float4* weights) {
  constexpr int kPairs = kHeads / 16;
#pragma unroll
  for (int r = 0; r < kColumns / kHeads; ++r) {
#pragma unroll
    for (int n = 0; n < kPairs; ++n) {
      const float4 w = weights[(r * kPairs + n) * 4];  // heads 16 n + 2 t, + 1, + 8, + 9
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
}

/// The sums of four lanes, always as (t + t^2) + (t^1 + t^3), the same bits in whichever lane they end: of two rows,
/// lane t gets row t / 2, key g + 8 (t % 2); of one, key g + 8 (t % 2), lanes 2 and 3 the same again.
__device__ inline float exchange(const float (&first)[2], const float (&second)[2]) {
  constexpr uint32_t kAll = 0xffffffffu;
  const bool high = (threadIdx.x & 2) != 0, odd = (threadIdx.x & 1) != 0;
  float both[2];
#pragma unroll
  for (int h = 0; h < 2; ++h)
    both[h] = (high ? second[h] : first[h]) + __shfl_xor_sync(kAll, high ? first[h] : second[h], 2);
  return (odd ? both[1] : both[0]) + __shfl_xor_sync(kAll, odd ? both[0] : both[1], 1);
}

/// Stores without a branch.
__device__ inline void store_if(bool condition, float* to, float x) {
  asm volatile("{\n .reg .pred p;\n setp.ne.s32 p, %2, 0;\n @p st.global.f32 [%0], %1;\n}" ::"l"(to), "f"(x),
               "r"(static_cast<int>(condition))
               : "memory");
}
__device__ inline void store_if(bool condition, uint16_t* to, float x) {
  asm volatile("{\n .reg .pred p;\n setp.ne.s32 p, %2, 0;\n @p st.global.u16 [%0], %1;\n}" ::"l"(to),
               "h"(float_to_bf16(x)), "r"(static_cast<int>(condition))
               : "memory");
}

/// What the warps of a warpgroup need to know of an item.
struct alignas(16) Item {
  int slot, num_rows;  // rows of queries that see the tile
  int tile_key;
  int out_row;  // of the first of them
};

/// The value of lane 0, which all lanes have: products under way across a branch that may diverge, to the compiler's
/// knowledge, would be waited for at once.
__device__ inline int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

template <class C, class Logit>
__global__ void __launch_bounds__(kThreads, 1) index_logits_kernel(const __grid_constant__ Problem p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_stream();
  let_next_start();
  extern __shared__ unsigned char shared[];
  __shared__ Schedule<kWarps, kMaxSlots> schedule;
  __shared__ uint64_t full[kWarpgroups][kStages], empty[kWarpgroups][kStages];
  __shared__ Item items[kWarpgroups][kStages];
  const int slots = p.rows_per_unit * p.units_per_phase;
  const uint32_t base = shared_address(shared), queries = (base + kAlignment - 1) / kAlignment * kAlignment;
  auto* const query_bytes = shared + (queries - base);  // [slot][head][128] swizzled
  auto* const weights =
      reinterpret_cast<float*>(query_bytes + C::padded(slots) * C::kSlotBytes);  // [slot][head pair][t][4]
  const int tid = threadIdx.x, lane = tid % 32, g = lane / 4, t = lane % 4;
  const int warp = uniform(tid / 32), warpgroup = warp / 4, in_group = warp % 4;
  const uint32_t ring = shared_address(weights + C::padded(slots) * C::kHeads) + warpgroup * kStages * kStageBytes;

  // Keys that surely lie in one page one behind the other are copied as a run; 0: each key by itself.
  const int run = p.cache.page_size % kTileKeys == 0 ? kTileKeys : p.cache.page_size % kWarpKeys == 0 ? kWarpKeys : 0;
  if (in_group == 0 && lane < kStages) {
    mbarrier_init(&full[warpgroup][lane], run > 0 ? 1 : 2 * 32);
    mbarrier_init(&empty[warpgroup][lane], 4);
  }
  fence_async_shared();
  int64_t begin, end;
  if (uniform(schedule.start(p, begin, end)) == 0) return;

  const auto* pool = static_cast<const unsigned char*>(p.cache.data);
  const int64_t to_scales = int64_t{p.cache.page_size} * kDim;  // from the start of a page
  int sequence = 0;  // of the warpgroup's next item; its stage and the parities of its barriers

  for (;;) {
    const bool last_phase = uniform(schedule.last_phase(p, end)) != 0;
    const Part* const parts = schedule.parts;
    // A warpgroup's item is a tile with all rows of the unit; with some of them in a phase of so few tiles that the
    // last round of the warpgroups would weigh.
    const int num_tiles = schedule.num_tiles(p);
    const int rows_per_item = num_tiles >= 8 * kWarpgroups || p.rows_per_unit <= C::kRowsPerItem ? p.rows_per_unit
                              : num_tiles >= 2 * kWarpgroups
                                  ? (p.rows_per_unit / 2 + C::kRowsPerItem - 1) / C::kRowsPerItem * C::kRowsPerItem
                                  : C::kRowsPerItem;
    const int items_per_tile =
        rows_per_item == p.rows_per_unit ? 1 : (p.rows_per_unit + rows_per_item - 1) / rows_per_item;
    const int num_items = uniform(num_tiles * items_per_tile);
    const int mine = num_items > warpgroup ? (num_items - warpgroup + kWarpgroups - 1) / kWarpgroups : 0;

    // What this warp copies next: it takes every fourth item of its warpgroup, and looks up where the keys lie right
    // after the copies before, so that nobody waits for a page id. A lane has a run.
    Item next{};
    int page = -1, offset = 0;
    auto look_up = [&](int k) {
      if (k >= mine) return;
      const int index = warpgroup + k * kWarpgroups, i = items_per_tile == 1 ? index : index / items_per_tile;
      const int e = schedule.part_of(i);
      const Part& part = parts[e];
      const int first_slot = e * p.rows_per_unit;
      next.tile_key = (part.first_tile + i - part.begin) * kTileKeys;
      int r = (index - i * items_per_tile) * rows_per_item;
      const int last = min(r + rows_per_item, part.num_rows);
      // Later rows see no less, so rows that do not see the tile come first.
      while (r < last && schedule.bounds[first_slot + min(r + C::kRowsPerStep, last) - 1] <= next.tile_key)
        r += C::kRowsPerStep;
      next.slot = first_slot + r;
      next.num_rows = max(last - r, 0);
      next.out_row = static_cast<int>(part.first_row - p.block.first_row) + r;
      const int position = next.tile_key + lane * run;
      page = -1;
      if (lane * run < kTileKeys && position < part.keys) {
        const PagePlace place = place_in_page(p, position);
        page = part.page_ids[place.index];
        offset = place.offset;
      }
    };
    auto copy_item = [&](int k) {
      const int of_all = sequence + k, at_stage = of_all % kStages;
      if (of_all >= kStages) mbarrier_wait(&empty[warpgroup][at_stage], (of_all / kStages - 1) & 1);
      if (lane == 0) items[warpgroup][at_stage] = next;
      const uint32_t stage = ring + at_stage * kStageBytes, scales = stage + kKeyBytes;
      uint64_t* const barrier = &full[warpgroup][at_stage];
      auto no_page = [&](int key) {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(scales + 4 * key), "r"(kNoPage) : "memory");
      };
      if (run > 0) {
        const bool known = page >= 0 && page < p.cache.num_pages, absent = !known && lane * run < kTileKeys;
        const int bytes = __popc(__ballot_sync(0xffffffffu, known)) * run * (kDim + 4);
        if (__any_sync(0xffffffffu, absent)) {
          if (absent)
            for (int key = lane * run; key < (lane + 1) * run; ++key) no_page(key);
          fence_async_shared();
          __syncwarp();
        }
        if (lane == 0) arrive_expecting(barrier, bytes);
        __syncwarp();
        if (known) {
          const unsigned char* from = pool + page * p.cache.page_stride_bytes;
          copy_bulk(stage + lane * run * kDim, from + int64_t{offset} * kDim, run * kDim, barrier);
          copy_bulk(scales + lane * run * 4, from + to_scales + int64_t{offset} * 4, run * 4, barrier);
        }
      } else {
        const int index = warpgroup + k * kWarpgroups, i = index / items_per_tile;
        const Part& part = parts[schedule.part_of(i)];
        const unsigned char* value[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int key = lane + 32 * h, position = next.tile_key + key;
          const PagePlace place = place_in_page(p, position);
          const int64_t its_page = position < part.keys ? part.page_ids[place.index] : -1;
          const bool known = its_page >= 0 && its_page < p.cache.num_pages;
          const unsigned char* from = pool + (known ? its_page : 0) * p.cache.page_stride_bytes;
          value[h] = known ? from + int64_t{place.offset} * kDim : nullptr;
          if (known) copy_async_4(scales + 4 * key, from + to_scales + int64_t{place.offset} * 4);
          else no_page(key);
        }
#pragma unroll 1
        for (int s = 0; s < kTileKeys / 4; ++s) {  // four keys
          const auto source = reinterpret_cast<const unsigned char*>(__shfl_sync(
              0xffffffffu, reinterpret_cast<unsigned long long>(s < 8 ? value[0] : value[1]), (4 * s + lane / 8) % 32));
          copy_async_16(stage + 512 * s + 16 * lane, source != nullptr ? source + lane % 8 * 16 : pool,
                        source != nullptr);
        }
        copy_async_arrive(barrier);
        mbarrier_arrive(barrier);
      }
    };
    // The warp whose turn an item is.
    const auto my_turn = [&](int k) { return (sequence + k) % 4 == in_group; };
    const int my_first = (in_group - sequence) & 3;
    look_up(my_first);
    if (my_first < kAhead) {
      if (my_first < mine) copy_item(my_first);
      look_up(my_first + 4);
    }

    // ---- queries and weights of the phase ----
    static_assert(C::kSlots * C::kHeads <= kThreads);
    float weight = 0.0f;
    const int weight_head = tid % C::kHeads, weight_slot = tid / C::kHeads;
    const int weight_part = over_rows(p, weight_slot), weight_row = weight_slot - weight_part * p.rows_per_unit;
    const bool has_weight = weight_slot < slots && weight_row < parts[weight_part].num_rows;
    if (has_weight && weight_head < p.num_heads) {
      const int64_t row = parts[weight_part].first_row + weight_row;
      weight = p.weights[row * p.weights_stride + weight_head];
    }
    for_each_query_piece<uint8_t, C::kHeads, kDim / 16, kThreads>(
        p, parts, slots, [&](int slot, int h, int piece, const uint4& v) {
          const uint32_t words[4] = {v.x, v.y, v.z, v.w};
          unsigned char* to = query_bytes + slot * C::kSlotBytes + h * kDim + piece % 4 * 4;
#pragma unroll
          for (int j = 0; j < 4; ++j)  // byte 32 (2 c + j / 2) + 16 (j % 2) of the head: its piece 4 c + j
            *reinterpret_cast<uint32_t*>(to + (((piece / 4 * 4 + j) ^ (h % 8)) * 16)) = words[j];
        });
    if (has_weight)
      weights[weight_slot * C::kHeads + weight_head / 16 * 16 + weight_head % 8 / 2 * 4 + weight_head / 8 % 2 * 2 +
              weight_head % 2] = weight;
    fence_async_shared();  // wgmma reads what was stored here
    __syncthreads();

    // ---- items ----
    const uint32_t keys_at = ring + (in_group * kWarpKeys + g) * kDim + t * 16;
    const uint32_t scales_at = ring + kKeyBytes + 4 * (in_group * kWarpKeys + g);
    const int my_key = in_group * kWarpKeys + g + 8 * (t % 2);  // whose results this lane stores, of row t / 2 of two
#pragma unroll 1
    for (int k = 0; k < mine; ++k) {
      const int at_stage = (sequence + k) % kStages;
      mbarrier_wait(&full[warpgroup][at_stage], ((sequence + k) / kStages) & 1);
      const Item item = items[warpgroup][at_stage];
      uint32_t keys[kDim / 32][4];  // A of each step: key g, key g + 8, then the same four values of K further on
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int c = 0; c < 2; ++c)
          asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
                       : "=r"(keys[2 * c][h]), "=r"(keys[2 * c][2 + h]), "=r"(keys[2 * c + 1][h]),
                         "=r"(keys[2 * c + 1][2 + h])
                       : "r"(keys_at + at_stage * kStageBytes + 8 * h * kDim + 64 * c)
                       : "memory");
      float scale;
      asm volatile("ld.shared.f32 %0, [%1];"
                   : "=f"(scale)
                   : "r"(scales_at + at_stage * kStageBytes + 32 * (t % 2))
                   : "memory");
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&empty[warpgroup][at_stage]);
      if (my_turn(k + kAhead)) {
        if (k + kAhead < mine) copy_item(k + kAhead);
        look_up(k + kAhead + 4);
      }

      int slot = uniform(item.slot), rows = uniform(item.num_rows);
      const int key = item.tile_key + my_key;
      Logit* out = static_cast<Logit*>(p.block.logits) + (item.out_row + t / 2) * p.block.stride + key;
      // Steps of one product each, two sets of accumulators: the products of the next step run under relu and weights
      // of this one. Unrolled, since products that are under way across a branch would be waited for there.
      auto score = [&]<int kSteps>(std::integral_constant<int, kSteps>) {
        float acc[2][kColumns / 2], sum[2][C::kRowsPerStep][2];
        const uint64_t b = k_major(queries + slot * C::kSlotBytes);
        const auto* w = reinterpret_cast<const float4*>(weights + slot * C::kHeads) + t;
        auto start = [&](int step) {
          start_products(acc[step % 2], keys, b + (step * C::kRowsPerStep * C::kSlotBytes >> 4));
        };
        // Two rows from `row` on; of one row lanes 2 and 3 have the same again.
        auto store = [&](int row, float logit_sum, bool one) {
          const bool seen = row + t / 2 < (one ? row + 1 : rows) && key < schedule.bounds[slot + row + t / 2];
          // A page outside the pool cannot be scored: the lowest rank, so that it is never preferred to a real key.
          const float logit = __float_as_uint(scale) == kNoPage ? -INFINITY : logit_sum * scale;
          store_if(seen, out + row * p.block.stride, logit);
        };
        start(0);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          if (step + 1 < kSteps) {
            start(step + 1);
            wait_for<1>(acc[step % 2]);
          } else {
            wait_for<0>(acc[step % 2]);
          }
          reduce_heads<C::kHeads>(sum[step % 2], acc[step % 2], w + step * C::kRowsPerStep * (C::kHeads / 4));
          if constexpr (C::kRowsPerStep == 2) store(2 * step, exchange(sum[step % 2][0], sum[step % 2][1]), false);
          else if (kSteps == 1) store(0, exchange(sum[0][0], sum[0][0]), true);
          else if (step % 2 == 1) store(step - 1, exchange(sum[0][0], sum[1][0]), false);
        }
        constexpr int kDone = kSteps * C::kRowsPerStep;
        slot += kDone;
        rows -= kDone;
        out += kDone * p.block.stride;
      };
#pragma unroll 1
      while (rows > 3 * C::kRowsPerStep) score(std::integral_constant<int, 4>());
      if (rows > C::kRowsPerStep) score(std::integral_constant<int, 2>());
      if (rows > 0) score(std::integral_constant<int, 1>());
    }
    sequence += mine;
    if (last_phase) return;
    schedule.next_phase(p, begin, end);
  }
#else
  __trap();  // the set refuses: see set.cpp
#endif
}

}  // namespace indexer
}  // namespace sm90
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
