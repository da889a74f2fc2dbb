/* gt/base/tile.cuh - for kernels: where elements of a tile lie in shared memory.  Lanes that access them together meet
 * different banks.  A piece is 16 bytes.  All functions return bytes from the start of a tile.
 *
 * | function              | where piece p of row r lies in it         | in different banks                        |
 * |-----------------------|-------------------------------------------|-------------------------------------------|
 * | panel_at<ROW>         | ROW bytes: p ^ (r / LINE) % PIECES        | 8 rows at one piece; 8 pieces of a row    |
 * | row_piece<N>          | N of 16 bits: p ^ (r ^ r / 8) % 8;        | 8 rows in a row; 8 rows of one parity     |
 * |                       | N = 32: two rows as one, p ^ (r / 2) % 8  |                                           |
 * | fp32_piece<N>         | N of fp32: p ^ fp32_swap(r)               | 2 pieces of rows 4 or 2 apart; 4 of rows  |
 * |                       |                                           | 1 or 2 apart                              |
 * | fp32_pair_at          | 64 of fp32, by 32 bytes: p ^ (r / 2) % 4  | 8 numbers in 4 neighbouring pairs of rows |
 * | fragment_of<CHANNELS> | 2 tokens, pair r, by 2 channels:          | 8 neighbours; 4 of 2 rows; 2 of 4 rows    |
 * |                       | p ^ (r % 4 + 4 ((r ^ r / 2) % 2))         |                                           |
 * | raw_offset<CHANNELS>  | 16 bits, 64 bytes: p ^ (r / 8) % 2;       | rows 4 or 8 apart                         |
 * |                       | CHANNELS = 32: 32 bytes by r / 4 % 2, too |                                           |
 *
 * panel_at is the hardware's swizzle for rows of 32 to 128 bytes (wgmma.cuh, bulk.cuh).  Longer rows also exchange 8
 * pieces.  The other functions serve mma, where lanes read two or four rows at once; a panel would put these rows into
 * the same banks.  Accumulators are float[TILES][4], in tiles of 8 columns, as every product takes them. */
#ifndef GT_BASE_TILE_CUH
#define GT_BASE_TILE_CUH

#include "device.cuh"

namespace gt {

/* ---- panels ------------------------------------------------------------------------------------------------------ */

template <int ROW>
GT_HD uint32_t panel_at(int row, int piece) {
    static_assert(ROW >= 16 && (ROW & (ROW - 1)) == 0, "bytes of a row");
    constexpr int LINE = ROW < 128 ? 128 / ROW : 1, PIECES = ROW < 128 ? ROW / 16 : 8;
    return (uint32_t)(row * ROW + 16 * (piece ^ row / LINE % PIECES));
}

/* panel_at over several panels, whose rows have at most 128 bytes.  `piece` counts through all panels of the matrix. */
template <int ROW>
GT_HD uint32_t tile_at(int row, int piece, uint32_t panel_bytes) {
    static_assert(ROW <= 128, "bytes of a row of a panel");
    return (uint32_t)(piece / (ROW / 16)) * panel_bytes + panel_at<ROW>(row, piece % (ROW / 16));
}

/* Stores a warp's 16 rows of accumulators as 16 bits: COUNT times 16 columns, rounded by pack(x, y).  at(k) is the
 * lane's address for stmatrix_x4 of columns 16 k; the matrices of stmatrix are first the halves of the rows. */
template <int COUNT, class At, class Pack>
GT_DEV void store_accumulators(const float (*tiles)[4], const At& at, const Pack& pack) {
    GT_UNROLL
    for (int k = 0; k < COUNT; k++) {
        const float(&low)[4] = tiles[2 * k], (&high)[4] = tiles[2 * k + 1];
        const uint32_t words[4] = {pack(low[0], low[1]), pack(low[2], low[3]), pack(high[0], high[1]),
                                   pack(high[2], high[3])};
        stmatrix_x4(at(k), words);
    }
}

/* ---- rows of 16 bits and of fp32 --------------------------------------------------------------------------------- */

template <int N>
GT_DEV uint32_t row_piece(int row, int piece) {
    if constexpr (N == 32) {
        const int line = row / 2;
        return 128 * line + 16 * (((row & 1) * 4 + piece) ^ (line & 7));
    } else {
        return 2 * N * row + 16 * (piece ^ ((row ^ row >> 3) & 7));
    }
}

/* Moves an address of row_piece or fp32_piece by 16 kk values, and by 16 rows as often as `rows` says.  One exclusive
 * or is enough for the exchange of pieces. */
GT_DEV uint32_t add_16(uint32_t piece, int kk) { return (piece ^ kk % 4 * 32) + kk / 4 * 128; }

template <int N>
GT_DEV uint32_t add_16_rows(uint32_t piece, int rows) {
    return (N == 32 ? piece : piece ^ rows % 4 * 32) + 32 * N * rows;
}

GT_DEV int fp32_swap(int row) { return (row >> 2 & 1) << 1 | ((row ^ row >> 1 ^ row >> 3) & 1) << 2; }

template <int N>
GT_DEV uint32_t fp32_piece(int row, int piece) {
    return 4 * N * row + 16 * (piece ^ fp32_swap(row));
}

/* Column `column` of row `row`. */
GT_DEV uint32_t fp32_pair_at(int row, int column) {
    return (uint32_t)(256 * row + 32 * (column / 8 ^ row / 2 % 4) + 4 * (column % 8));
}

/* ---- fragments: two tokens by two channels ----------------------------------------------------------------------- */

/* channel: even. */
template <int CHANNELS>
GT_DEV uint32_t fragment_of(int pair, int channel) {
    const int swap = ((pair ^ pair >> 1) & 1) << 2 | (pair & 3);
    return 8 * pair * CHANNELS + 16 * (channel / 2 ^ swap);
}

/* Moves an address by 8 kk channels of fragments.  One exclusive or is enough for the exchange of pieces. */
GT_DEV uint32_t add_8(uint32_t address, int kk) { return (address ^ kk % 2 * 64) + kk / 2 * 128; }

/* Offset of a channel in the 16-bit rows from which fragments are made. */
template <int CHANNELS>
GT_DEV uint32_t raw_offset(int row, int channel) {
    const int swap = (row >> 3 & 1) << 6 | (CHANNELS == 32 ? (row >> 2 & 1) << 5 : 0);
    return (2 * (row * CHANNELS + channel)) ^ swap;
}

} /* namespace gt */

#endif
