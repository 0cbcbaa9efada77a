// What decides between ways of the Hopper decode kernel, in one place, with what each number was chosen by. Times are
// of one H200; a tile is 64 lanes by 64 keys, 1.7 to 1.9 us in a block that has the tensor cores to itself.
#pragma once

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace sm90 {

/// The price, in tiles, of a further group in a part beside its tiles: loading Q, the first tile's way to the first
/// product, results.
constexpr int kFixedTiles = 3;

/// What cutting the line costs more than whole groups do, in tiles: further pieces and the merge (kCutTiles), and with
/// 64 lanes the partial results of two pieces a part, written and read (kCutTiles64: 70 MB of the whole chip at 5 TB/s,
/// 14 us). Before groups stayed whole, 64 requests of two rows of 128 heads with 1,024 keys took 113.5 us, 31 tiles a
/// block of which account for 58.
constexpr int kCutTiles = 4, kCutTiles64 = 7;

/// Cuts of the line move by up to so many tiles so as not to leave a piece below it: a piece costs kFixedTiles.
constexpr int kMinPiece = 2;

/// What a part adds to a call's time by its partial results of 64 lanes, written and merged by the whole chip, over
/// that of a tile in a block (2 us); a group of more lanes as much for each 64. One request of 128 heads
/// took 15.4, 17.7 and 22.3 us in 16, 32 and 64 parts of a tile, and 26.0, 30.6 and 38.6 us in 64 parts of 2, 4 and 8.
/// With n parts of total / n tiles the time is least at a piece of sqrt(kPartTiles * lanes / 64 * total) tiles. With
/// twice this for 64 lanes, too, one request of 64 heads with 16,384 keys took 25.8 us for 23.5; with 128 lanes and
/// 4,096 keys 19.5 for 22.0.
constexpr float kPartTiles = 0.0325f;

/// So many tiles before they are loaded gathered rows are asked for from memory, so that the L2 answers their load.
/// Sparse decode gained 3 % in the mean, 64 requests of 128 heads 9 %. Pages lose by it: 2 tiles ahead took 715 us
/// where none took 637 (128 requests of 16 heads, 16,384 keys), and 648 where none took 593 (64 of 128 heads).
constexpr int kRowsAhead = 2;

/// Lanes of a warp that arrive when a half of a tile is released: 1 is enough, 32 are what racecheck can follow. Four
/// releases of 128 arrivals for each pair of tiles: not measured yet against 1.
constexpr int kReleasingLanes = 32;

}  // namespace sm90
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
