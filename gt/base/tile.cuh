/* gt/base/tile.cuh - for kernels: the layouts of tiles in shared memory.  Every layout permutes the pieces of a row, so
 * that lanes that access a tile together use different banks.  A piece is 16 bytes unless the table says otherwise.
 * All functions return bytes from the start of a tile.
 *
 * | function              | row r; the place of its piece p           | pieces in different banks                 |
 * |-----------------------|-------------------------------------------|-------------------------------------------|
 * | panel_at<ROW>         | ROW bytes; p ^ (r / LINE) % PIECES        | piece p of 8 rows; 8 pieces of one row    |
 * | row_piece<N>          | N numbers of 16 bits;                     | piece p of 8 adjacent rows, or of rows    |
 * |                       | p ^ (r ^ r / 8) % 8.  N = 32: two rows    | r, r + 2, ... r + 14                      |
 * |                       | form a line of 8 pieces, p ^ (r / 2) % 8  |                                           |
 * | fp32_piece<N>         | N numbers of fp32; p ^ fp32_swap(r)       | 2 pieces of rows r, r ^ 2, r ^ 4, r ^ 6;  |
 * |                       |                                           | 4 pieces of rows r and r ^ 1, or r ^ 2    |
 * | fp32_pair_at          | 64 numbers of fp32, pieces of 32 bytes;   | a piece of each of rows r, r + 2, r + 4,  |
 * |                       | p ^ (r / 2) % 4                           | r + 6                                     |
 * | fragment_of<CHANNELS> | a pair of tokens, pieces of 2 tokens by   | 8 pieces of one row; 4 of rows r, r ^ 1;  |
 * |                       | 2 channels; p ^ (r % 4 +                  | 2 of rows r, r ^ 1, r ^ 2, r ^ 3          |
 * |                       | 4 ((r ^ r / 2) % 2))                      |                                           |
 * | raw_offset<CHANNELS>  | CHANNELS numbers of 16 bits, pieces of    | a channel in rows 4 or 8 apart            |
 * |                       | 64 bytes; p ^ (r / 8) % 2.  CHANNELS =    |                                           |
 * |                       | 32: their halves are swapped by r / 4 % 2 |                                           |
 *
 * panel_at is the hardware's swizzle for rows of 32 to 128 bytes (wgmma.cuh, bulk.cuh).  In longer rows it permutes 8
 * pieces at a time.  The other functions serve mma, where lanes read two or four rows at once; a panel would put these
 * rows into the same banks.  Accumulators are float[TILES][4], in tiles of 8 columns, the layout of every product. */
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

/* Stores a warp's 16 rows of accumulators as 16-bit numbers: COUNT times 16 columns, rounded by pack(x, y).  at(k) is
 * the lane's address for stmatrix_x4 of columns 16 k ... 16 k + 15.  The four matrices of stmatrix are the upper and
 * the lower 8 rows of the first 8 columns, then of the last 8. */
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

/* add_16() moves an address of row_piece by 16 kk numbers, add_16_rows() by 16 * `rows` rows.  One exclusive or is
 * enough for the permutation of pieces. */
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

/* Returns the offset of one number. */
GT_DEV uint32_t fp32_pair_at(int row, int column) {
    return (uint32_t)(256 * row + 32 * (column / 8 ^ row / 2 % 4) + 4 * (column % 8));
}

/* ---- fragments: two tokens by two channels ----------------------------------------------------------------------- */

/* Returns the offset of channels `channel` (even) and channel + 1 of a pair of tokens. */
template <int CHANNELS>
GT_DEV uint32_t fragment_of(int pair, int channel) {
    const int swap = ((pair ^ pair >> 1) & 1) << 2 | (pair & 3);
    return 8 * pair * CHANNELS + 16 * (channel / 2 ^ swap);
}

/* Moves an address of fragment_of by 8 kk channels.  One exclusive or is enough for the permutation of pieces. */
GT_DEV uint32_t add_8(uint32_t address, int kk) { return (address ^ kk % 2 * 64) + kk / 2 * 128; }

/* Returns the offset of a channel in the 16-bit rows from which fragments are made. */
template <int CHANNELS>
GT_DEV uint32_t raw_offset(int row, int channel) {
    const int swap = (row >> 3 & 1) << 6 | (CHANNELS == 32 ? (row >> 2 & 1) << 5 : 0);
    return (2 * (row * CHANNELS + channel)) ^ swap;
}

} /* namespace gt */

#endif
