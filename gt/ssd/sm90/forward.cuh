/* gt/ssd/sm90/forward.cuh - ssd forward on compute capability 9.0, by wgmma.  It computes the same as
 * forward_tensor_kernel (mma/forward.cuh).  N is at most 128, or at most 256 if a group has at least two units
 * (units_of_forward()).
 *
 * A unit is 64 rows of a head's state (mma/state.cuh).  A block has UNITS units of one group.  It takes a segment of a
 * sequence chunk by chunk; a chunk has 64 tokens (mma/chunk.cuh).
 *
 * WARPGROUPS
 *     producer     The last warpgroup.  It copies x, B and C of later chunks by cp.async, and z of the chunk that the
 *                  consumers have begun.  It converts B and C to f16 in place, once for all units.  One warp per unit
 *                  computes decay factors and merges them with the powers of B, C and x.  These warps must not stall on
 *                  loads, so dt arrives in registers one chunk ahead (UnitTimes).  The producer waits for the previous
 *                  kernel only if the call ranks its sequences (Problem::order).  Consumers wait unless they read only
 *                  the caller's tensors (is_apart()).
 *     consumers    Two warpgroups with one or two units each, or one warpgroup if the block has one unit.  If the
 *                  kernel applies z and has four units and N <= 64, there are four warpgroups with one unit each
 *                  (CONSUMERS), because such a state takes few registers.  States stay in registers in the layout of
 *                  accumulators, 16 rows per warp.  For each chunk the consumers compute:
 *
 *         1  S = C B^T                        64 x 64 x N, from shared memory, once for all units.
 *            M_ts = S_ts L_ts Delta_s         for each unit, to shared memory as f16; zero above the diagonal.
 *         2  y^T = H C^T                      64 x 64 x N; H from registers, packed to f16 without a scale.
 *            y^T = pre y^T + x^T M^T          64 x 64 x 64; x^T by transposed loads; + Dskip x, times silu(z).
 *                                              In backward: times dy silu'(z), which gives dz instead of y.
 *         3  H <- E H + (x Delta suf)^T B     64 x N x 64, of f16.  The sum starts at zero; an fp32 addition adds it to
 *            H (mma/state.cuh).  y overwrites x in shared memory.
 *         Bulk copies (tile_store) store y of whole chunks; one warp per unit starts them.  Three results are stored by
 *         threads, by rows, while S of the next chunk is computed: dz, y of a packed sequence's short last chunk, and y
 *         without a tensor map.
 *         STORES_LATE: in kernels with three stages of x and two states of 128 columns per warpgroup, the consumers are
 *         slower than the producer.  So bulk copies of y start together with S of the next chunk and end before its M
 *         is complete.  Other kernels store y at once, to free the stage of x early.  Bulk copies also store
 *         checkpoints, while S of the chunk is computed.
 *
 * SHARED MEMORY in KB, N = 128, UNITS = 4: 226.5 in all, so one block per multiprocessor.  HopperTile has every offset.
 * The last column names the warpgroups that write the buffer.
 *
 *     X                96     three stages of four units; y overwrites x             producer; consumers
 *                             with z: 64, two stages; x arrives with B and C.
 *     GATE             32     with z: z of four units                                producer
 *                             for dz: z and dy of one unit per warpgroup             consumers.
 *     M                32     M of each unit; checkpoints pass through it            consumers
 *     B, C             64     two stages; 16-bit inputs, then f16 in place           producer
 *     FACTORS          29.3   two stages of each unit: Merged, 936 floats            producer.
 *     PREPARED          4.1   two stages of each unit: weights of the update         producer
 *     B_INVERSE ...     1.1   inverse powers of B and C; cursors of warpgroups; barriers.
 *
 * The third stage of x hides the latency of its copies behind the preparation of the previous chunk.
 * ONE UNIT.  A block has one consumer and a producer in two cases: a group has one unit (a head with P <= 64), or
 * sequences are short and heads few (units_of_forward()).  A block of one unit mostly waits for latencies, so two
 * blocks share a multiprocessor.
 *     N <= 64 runs as 64 columns, in 105.3 KB.  B and C have three stages and x has four, so that all copies of a chunk
 *     are issued one chunk ahead.  One warp of the producer computes factors while the other three convert B and C to
 *     f16 (prepare_beside_factors()).
 *     N <= 128 takes 105.2 KB, with two stages of each tensor.  One kernel serves calls with and without z.
 *     forward_tensor_kernel computes dz.
 * GATE.  z has one stage.  For dz, each consumer copies z and dy itself by cp.async, in rows of 128 bytes.  It copies
 * the next unit's rows after its four warps have read the current unit's rows, which takes two barriers per unit.
 * Without barriers each warp would copy its own 32 bytes of every row.  Such copies made forward with z a sixth slower.
 * MBARRIERS.  FULL and EMPTY belong to a stage of B, C, FACTORS and PREPARED.  The producer's threads arrive at FULL.
 * The consumers' threads arrive at EMPTY when their products have ended and they have read z, so the producer may then
 * also copy z of the next chunk.  X_EMPTY belongs to a stage of x; the consumers' threads arrive when y is stored.
 * GATE_FULL belongs to z; the producer's copies arrive.
 * REGISTERS per thread, N = 128, UNITS = 4: a consumer has 216, of which H takes 128, y, S or sums 32, x 16, and v 16.
 * The producer has 72.
 *     With four consumers, each has 104 and the producer 64; all have 96 at the launch.  With one consumer, it has 160
 *     and the producer 96; both have 128 at the launch.
 * N > 128: one launch of 256 columns with UNITS = 2, because one state takes as many registers as two of 128 columns.
 *     Shared memory takes 209.8 KB, or 225.8 KB for dz.  A consumer has 208 registers, the producer 88.
 *
 * NUMBERS.  The product of x and M takes f16, too.  x comes from registers, with a power of two per token.  M has one
 * power for all elements, from a bound.
 * ISSUE SLOTS per token and head.  N = 128, UNITS = 4: 101, measured at commit 922c519, of which the producer takes 29;
 * they fill 44 % of all slots.  N = 64, UNITS = 1: about 94, counted in the machine code, of which the producer takes
 * 39.
 * PRODUCTS, clocks of the tensor cores per unit and chunk at full rate, N = 128: S 128, y 256 + 128, H 256.
 * BYTES per token and head: x, y (and z, and dy for dz) 2 P each.  B and C together 4 N / heads of a group from memory,
 * and N from L2 with UNITS = 4.  Checkpoints P N / 64.
 * grid: strands*G*bundles (a bundle has UNITS units); block 384 or 640, with one unit 256.  Every sum has one fixed
 * order, so results are deterministic. */
#ifndef GT_SSD_SM90_FORWARD_CUH
#define GT_SSD_SM90_FORWARD_CUH

#include "../../base/bulk.cuh"
#include "../mma/state.cuh"
#include "block.cuh"

namespace gt {
namespace ssd {

constexpr int MEASURED_SLOTS = 8; /* at every 8th checkpoint, the true maximum replaces a state's bound */

/* Offsets of the decay factors after finish_factors() has merged them with the powers of B, C and x.  They overwrite
 * Factors. */
struct Merged {
    static constexpr int RIGHT = Factors::DELTA; /* [s] Delta / powers of B and x */
    static constexpr int PRE = Factors::PRE;     /* [t] pre / power of C */
    static constexpr int ROW = Factors::U;       /* [t] U . power of M / power of C */
    static constexpr int LEFT = Factors::V;      /* [t] power of M / power of C */
    static constexpr int HALF = Factors::HALF;   /* HALF times RIGHT for a block's first 8 tokens, HALF times LEFT for
                                                * its last 8 */
    static constexpr int DIAGONAL = Factors::DIAGONAL;
    static constexpr int COUNT = 936;
    static constexpr int OWN =
        DIAGONAL; /* [unit_warp][2][t]: overwrites DIAGONAL after M is stored; a warp's factors of y, then of x */

    /* Returns the offset of an array that holds RIGHT . V . between for each token s before block `block`, which holds
     * token t.  block: 1 to 3. */
    GT_HD int column(int block) { return block == 1 ? Factors::SUF + 48 : block == 2 ? Factors::COUNT : Factors::SUF; }
};
static_assert(Merged::COUNT == Factors::COUNT + 32, "columns of block 2 follow the factors");

/* More inputs of the consumers for a chunk and unit, as offsets in floats.  WEIGHTS: Weights, with the inverse of M's
 * power in PAIRS.  FROM_STATES: a bound of pre C H^T if |H| <= 1.  X_POWERS: the powers of two by which rows of x are
 * converted to f16. */
struct Prepared {
    static constexpr int WEIGHTS = 0, FROM_STATES = 67, X_POWERS = 68, COUNT = 132;
};
static_assert(Weights::PAIRS < Prepared::FROM_STATES && Weights::COUNT <= Prepared::X_POWERS, "apart");

/* One warp turns Factors into Merged, and computes the weights of the state's update.  b, c: inverse powers of rows 2
 * lane and 2 lane + 1 of B and C.  prepared: address of Prepared.  On entry its X_POWERS holds the largest magnitude of
 * each row of x. */
template <int NP>
GT_DEV void finish_factors(uint32_t addresses, uint32_t prepared, float2 b, float2 c) {
    const int lane = own_lane(), t = 2 * lane, block = lane / 8;
    const auto two = [&](int at) { return lds<float2>(addresses + 4 * (at + t)); };
    const auto put = [&](int at, float2 x) { sts<float2>(addresses + 4 * (at + t), x); };
    const float2 x = lds<float2>(prepared + 4 * (Prepared::X_POWERS + t));
    const float2 delta = two(Factors::DELTA), suf = two(Factors::SUF);
    const float2 pre = two(Factors::PRE), U = two(Factors::U), V = two(Factors::V), half = two(Factors::HALF);
    const float between[2] = {lds<float>(addresses + 4 * (Factors::BETWEEN + (block == 1 ? 1 : 0))),
                              lds<float>(addresses + 4 * (Factors::BETWEEN + 2))};
    const float growth = lds<float>(addresses + 4 * Factors::GROWTH);
    const Power power_x = power_of(x.x), power_y = power_of(x.y);
    const float2 plain = {delta.x * b.x, delta.y * b.y};
    const float2 right = {plain.x * power_x.inverse, plain.y * power_y.inverse};
    float most_right = fmaxf(fabsf(right.x), fabsf(right.y)), most_left = fmaxf(c.x, c.y);
    GT_UNROLL
    for (int mask = 1; mask < 32; mask *= 2) {
        most_right = fmaxf(most_right, shfl_xor(most_right, mask));
        most_left = fmaxf(most_left, shfl_xor(most_left, mask));
    }
    const Power power = power_of(finite(most_right * most_left * growth * (0x1p28f * NP)));
    const float2 left = {c.x * power.value, c.y * power.value};
    const float2 weight = {plain.x * suf.x, plain.y * suf.y};
    sync_warp(); /* all lanes have read the factors */
    put(Merged::RIGHT, right);
    put(Merged::LEFT, left);
    put(Merged::PRE, {finite(pre.x * c.x), finite(pre.y * c.y)});
    put(Merged::ROW, {finite(U.x * left.x), finite(U.y * left.y)});
    const float2 other = lane & 4 ? left : right;
    put(Merged::HALF, {finite(half.x * other.x), finite(half.y * other.y)});
    const float2 column = {finite(V.x * right.x), finite(V.y * right.y)};
    if (block < 1) put(Merged::column(1), column);
    if (block < 2) {
        const float factor = block == 1 ? 1.0f : between[0];
        put(Merged::column(2), {finite(column.x * factor), finite(column.y * factor)});
    }
    if (block < 3) {
        const float factor = block == 2 ? 1.0f : block == 1 ? between[0] : between[1];
        put(Merged::column(3), {finite(column.x * factor), finite(column.y * factor)});
    }
    sts<float2>(prepared + 4 * (Prepared::X_POWERS + t), {power_x.value, power_y.value});
    make_weights(prepared + 4 * Prepared::WEIGHTS, weight,
                 {finite(x.x * fabsf(weight.x)), finite(x.y * fabsf(weight.y))});
    if (lane == 0) {
        sts<float>(prepared + 4 * Weights::PAIRS, power.inverse);
        sts<float>(prepared + 4 * Prepared::FROM_STATES, finite(most_left * growth * (0x1p14f * NP)));
    }
}

/* ---- shared memory ---------------------------------------------------------------------------------------------- */

/* A kernel's output.  UNGATED: y without z.  GATED: y with or without z.  GATE_GRADIENT: dz instead of y.  One kernel
 * for all three would be 3 to 7 % slower with z. */
constexpr int UNGATED = 0, GATED = 1, GATE_GRADIENT = 2;

/* How rows arrive in shared memory.  COPIED_ROWS: the producer copies them by cp.async and converts B and C to f16.
 * MAPPED_ROWS: tensor maps load x and z, and a previous kernel has converted B and C (forward_maps.cuh).
 * CONVOLVED_ROWS: like MAPPED_ROWS, but one more warpgroup convolves x in place (gt/fused/conv_ssd_sm90.cuh). */
constexpr int COPIED_ROWS = 0, MAPPED_ROWS = 1, CONVOLVED_ROWS = 2;

/* Offsets in shared memory, in bytes.  Comments give the shapes of arrays. */
template <class T_, int NP_, int UNITS_, int GATE_, int ROWS_ = COPIED_ROWS>
struct HopperTile {
    using T = T_;
    static constexpr bool HAS_GATE = GATE_ != UNGATED, MAKES_DZ = GATE_ == GATE_GRADIENT,
                          HAS_MAPS = ROWS_ != COPIED_ROWS, CONVOLVES = ROWS_ == CONVOLVED_ROWS;
    /* The code that stores a snapshot is a third of the code of the loop over chunks.  Even if no snapshot is due, this
     * code makes blocks of four units 1 to 4 % slower.  So calls with snapshots take blocks of at most two units
     * (choose_on_tensor_cores()). */
    static constexpr bool HAS_SNAPSHOTS = !MAKES_DZ && UNITS_ <= 2;
    static constexpr int NP = NP_, UNITS = UNITS_,
                         CONSUMERS = UNITS == 1                                              ? 1
                                     : GATE_ == GATED && UNITS == 4 && NP <= 64 && !HAS_MAPS ? 4
                                                                                             : 2;
    static constexpr int CONSUMER_UNITS = UNITS / CONSUMERS;                      /* units of a consumer */
    static constexpr int GATES = MAKES_DZ ? 2 * CONSUMERS : HAS_GATE ? UNITS : 0; /* tiles of z and dy */
    static constexpr int THREADS = (CONSUMERS + 1 + CONVOLVES) * WARPGROUP,
                         FIT = UNITS == 1 ? 2 : 1; /* blocks per multiprocessor */
    static constexpr int REGISTERS = UNITS == 1                 ? 160
                                     : CONSUMERS == 4           ? 104
                                     : NP > 128                 ? 208
                                     : ROWS_ == MAPPED_ROWS     ? 232
                                     : CONSUMER_UNITS *NP > 128 ? 216
                                     : CONVOLVES                ? 184
                                                                : 200,
                         PRODUCER_REGISTERS = UNITS == 1       ? 256 - REGISTERS
                                              : CONSUMERS == 4 ? 64
                                              : CONVOLVES      ? 256 - REGISTERS /* the convolver's registers, too */
                                                               : 504 - 2 * REGISTERS;
    static constexpr int ROW = NP < 64 ? 2 * NP : 128, PANEL = CHUNK * ROW; /* bytes of a row and a panel of B and C:
                                                                             * see wgmma.cuh */
    static constexpr int TILE_X = CHUNK * 128, TILE_B = CHUNK * 2 * NP;
    static constexpr int B_STAGES = UNITS == 1 && NP <= 64 ? 3 : 2, B_AHEAD = B_STAGES - 2;
    static constexpr int X_STAGES = B_AHEAD                                                 ? 4
                                    : HAS_GATE && (UNITS == 1 || CONSUMER_UNITS * NP > 128) ? 2
                                                                                            : 3,
                         X_AHEAD = X_STAGES > 2;
    static constexpr bool STORES_LATE =
        CONSUMER_UNITS * NP > 128 && CONSUMER_UNITS > 1 && X_STAGES > 2;     /* see the top of the file */
    static constexpr int LATER = X_AHEAD + (HAS_GATE && !MAKES_DZ);          /* cp.async groups that are committed after
                                                                              * B and C of a chunk */
    static constexpr int X = 0;                                              /* [X_STAGES][UNITS]; y overwrites x */
    static constexpr int GATE = X + X_STAGES * UNITS * TILE_X;               /* [UNITS]: z; for dz [CONSUMERS][2]: z and
                                                                              * dy */
    static constexpr int M = GATE + GATES * TILE_X;                          /* [UNITS] */
    static constexpr int B = M + UNITS * TILE_X;                             /* [B_STAGES] */
    static constexpr int C = B + B_STAGES * TILE_B;                          /* [B_STAGES] */
    static constexpr int FACTORS = C + B_STAGES * TILE_B;                    /* [2][UNITS] */
    static constexpr int PREPARED = FACTORS + 2 * UNITS * 4 * Merged::COUNT; /* [2][UNITS] */
    static constexpr int B_INVERSE = PREPARED + 2 * UNITS * 4 * Prepared::COUNT;
    static constexpr int C_INVERSE = B_INVERSE + 4 * CHUNK;
    static constexpr int CURSOR = C_INVERSE + 4 * CHUNK; /* one per warpgroup */
    static constexpr int FULL = CURSOR + (CONSUMERS + 1 + CONVOLVES) * GroupCursor<UNITS>::BYTES,
                         EMPTY = FULL + 16;    /* [2] */
    static constexpr int X_EMPTY = EMPTY + 16; /* [X_STAGES] */
    static constexpr int GATE_FULL = X_EMPTY + 8 * X_STAGES;
    static constexpr int X_FULL = GATE_FULL + 8; /* with HAS_MAPS: [X_STAGES][UNITS], for x as loaded */
    static constexpr int CONVOLVED = X_FULL + HAS_MAPS * 8 * X_STAGES * UNITS; /* [2] */
    static constexpr int GATE_AT = CONVOLVED + CONVOLVES * 16; /* [UNITS][2], for dz: offsets of the segment's first
                                                                * rows in z and dy */
    using Chunks = Ring<2, FULL, EMPTY>;                       /* B, C, FACTORS and PREPARED */
    using Rows = Ring<X_STAGES, NO_BARRIER, X_EMPTY>;          /* x; with COPIED_ROWS, FULL of Chunks also covers x */
    using LoadedRows = Ring<X_STAGES, X_FULL, NO_BARRIER, 8, UNITS>; /* with HAS_MAPS: x of a unit, as loaded */
    using Gate = Ring<1, GATE_FULL>;                                 /* z; EMPTY of Chunks also frees z */
    using ConvolvedChunks = Ring<2, CONVOLVED>;
    static constexpr int BYTES = GATE_AT + MAKES_DZ * UNITS * 16;
    static_assert(PREPARED % 16 == 0 && FULL % 8 == 0, "aligned");
    static_assert(FIT * (BYTES + 1024) <= 228 * 1024, "fits sm_90");
};

/* The offset of a piece of a row in a tile of B or C. */
template <class Tile>
GT_DEV uint32_t group_address(int row, int piece) {
    return tile_at<Tile::ROW>(row, piece, Tile::PANEL);
}

/* ---- producer ---------------------------------------------------------------------------------------------------- */

/* For `rows` rows of a unit's x from row `first` on, one warp stores the largest magnitude of each row to maxima[row].
 * first and rows are multiples of 8 AT_ONCE.  maxima: fp32 in shared memory. */
template <class T, int AT_ONCE>
GT_DEV void row_maxima(uint32_t tile, uint32_t maxima, int first, int rows) {
    using Lanes = RowLanes<64>;
    const Lanes at(own_lane());
    GT_NO_UNROLL
    for (int block = first / Lanes::ROWS; block < (first + rows) / Lanes::ROWS; block += AT_ONCE) {
        uint4 x[AT_ONCE][Lanes::PIECES];
        GT_UNROLL
        for (int i = 0; i < AT_ONCE * Lanes::PIECES; i++)
            x[i / Lanes::PIECES][i % Lanes::PIECES] =
                lds<uint4>(tile + at.address(block + i / Lanes::PIECES, i % Lanes::PIECES));
        GT_UNROLL
        for (int k = 0; k < AT_ONCE; k++) {
            const float largest = row_maximum<T, Lanes::LANES>(larger_of<T>(x[k]));
            if (at.piece == 0) sts<float>(maxima + 4 * ((block + k) * Lanes::ROWS + at.row), largest);
        }
    }
}

/* rows_to_f16() for B or C, whose tiles have the panel layout of wgmma.  One warp converts AT_ONCE blocks of rows:
 * block `first`, and then every step-th block. */
template <class Tile, int AT_ONCE>
GT_DEV void blocks_to_f16(uint32_t tile, uint32_t inverses, int first, int step) {
    using T = typename Tile::T;
    using Lanes = RowLanes<Tile::NP>;
    constexpr int PIECES = Lanes::PIECES;
    const Lanes at(own_lane());
    const auto row = [&](int block) { return (step * block + first) * Lanes::ROWS + at.row; };
    const auto address = [&](int block, int i) {
        return tile + group_address<Tile>(row(block), at.piece + Lanes::LANES * i);
    };
    uint4 x[AT_ONCE][PIECES];
    GT_UNROLL
    for (int i = 0; i < AT_ONCE * PIECES; i++) x[i / PIECES][i % PIECES] = lds<uint4>(address(i / PIECES, i % PIECES));
    float largest[AT_ONCE];
    GT_UNROLL
    for (int k = 0; k < AT_ONCE; k++) largest[k] = row_maximum<T, Lanes::LANES>(larger_of<T>(x[k]));
    GT_UNROLL
    for (int k = 0; k < AT_ONCE; k++) {
        const Power power = power_of(largest[k]);
        GT_UNROLL
        for (int i = 0; i < PIECES; i++)
            sts<uint4>(address(k, i), {scaled_f16<T>(x[k][i].x, power.value), scaled_f16<T>(x[k][i].y, power.value),
                                       scaled_f16<T>(x[k][i].z, power.value), scaled_f16<T>(x[k][i].w, power.value)});
        if (at.piece == 0) sts<float>(inverses + 4 * row(k), power.inverse);
    }
}

/* Four warps convert all rows of B or C to f16. */
template <class Tile>
GT_DEV void group_to_f16(uint32_t tile, uint32_t inverses, int warp) {
    constexpr int ALL = CHUNK / RowLanes<Tile::NP>::ROWS, OWN = ALL >= 8 ? 2 : 1;
    constexpr int AT_ONCE = Tile::NP > 128 ? 1 : OWN;
    if (warp >= ALL) return;
    GT_NO_UNROLL
    for (int first = 0; first < OWN; first += AT_ONCE)
        blocks_to_f16<Tile, AT_ONCE>(tile, inverses, 4 * first + warp, 4);
}

/* For blocks of one unit whose copies run one chunk ahead.  Warps 1 to 3 of the producer call this function while warp
 * 0 computes factors.  They convert rows of B and C, 16 at a time.  Warp 3 has fewer rows, so it also finds the largest
 * magnitudes in rows of x.  inverses: of B's rows, then of C's rows. */
template <class Tile>
GT_DEV void prepare_beside_factors(uint32_t B, uint32_t C, uint32_t inverses, uint32_t x, uint32_t maxima, int warp) {
    static_assert(Tile::UNITS == 1 && RowLanes<Tile::NP>::ROWS == 8, "a tile is 4 times 16 rows");
    GT_NO_UNROLL
    for (int i = warp - 1; i < 8; i += 3)
        blocks_to_f16<Tile, 2>(i < 4 ? B : C, inverses + i / 4 * 4 * CHUNK, 2 * (i % 4), 1);
    if (warp == 3) row_maxima<typename Tile::T, 4>(x, maxima, 0, CHUNK);
}

template <class Tile>
GT_DEV void forward_producer(const TensorParams& p, uint32_t smem) {
    using T = typename Tile::T;
    constexpr int BARRIER = 1, UNITS = Tile::UNITS;
    const Problem& in = p.in;
    const GroupCursor<UNITS> cursor = {smem + Tile::CURSOR + Tile::CONSUMERS * GroupCursor<UNITS>::BYTES};
    const CopiedRows<8> of_units;
    const CopiedRows<Tile::NP / 8> of_group;
    const int warp = warp_id() % 4, unit = warp % UNITS;
    const bool makes_factors = warp < UNITS, finds_maxima = UNITS != 2 || warp >= UNITS;
    const bool copies_gate = Tile::HAS_GATE && !Tile::MAKES_DZ && in.z;
    const typename Tile::Chunks ring = {smem};
    const typename Tile::Rows rows = {smem};
    int n = 0; /* counts chunks over all segments */
    each_bundle_item(in, [&](const Span& span, int64_t item) {
        if (!span.exists) return item;
        cursor.enter(in, span, item, BARRIER, [&] {
            cursor.put_offsets(0, in.x_stride);
            if (copies_gate) cursor.put_offsets(1, in.z_stride);
        });
        const int chunks = cursor.chunks();
        /* where the thread's rows of the next chunk to copy begin */
        const T *B, *C;
        int64_t x = of_units.own(in.x_stride.t), z = copies_gate ? of_units.own(in.z_stride.t) : 0;
        const int64_t b = cursor.b(), token = cursor.token(0);
        B = of_group.own(static_cast<const T*>(in.Bm) + offset_of(in.Bm_stride, b, token, cursor.group()),
                         in.Bm_stride.t);
        C = of_group.own(static_cast<const T*>(in.Cm) + offset_of(in.Cm_stride, b, token, cursor.group()),
                         in.Cm_stride.t);
        int64_t times = offset_of(in.dt_stride, b, token, cursor.head(unit));
        UnitTimes of_unit = {};
        if (makes_factors) of_unit.enter(in, cursor.head(unit));
        const auto load_times = [&](int chunk) {
            if (makes_factors && chunk < chunks) of_unit.load(in, times, cursor.tokens(chunk));
            times += CHUNK * in.dt_stride.t;
        };
        const auto load_group = [&](int chunk, int number) {
            if (!Tile::B_AHEAD || chunk < chunks) {
                const int at = number % Tile::B_STAGES * Tile::TILE_B, tokens = cursor.tokens(chunk);
                of_group.copy(smem + Tile::B + at, B, in.Bm_stride.t, tokens, in.N);
                of_group.copy(smem + Tile::C + at, C, in.Cm_stride.t, tokens, in.N);
            }
            B += CHUNK * in.Bm_stride.t, C += CHUNK * in.Cm_stride.t;
            cp_async_commit();
        };
        const auto load_x = [&](int chunk, int number) {
            if (chunk < chunks) {
                rows.wait_free(number);
                copy_units(of_units, cursor, 0, smem + Tile::X + number % Tile::X_STAGES * UNITS * Tile::TILE_X,
                           static_cast<const T*>(in.x), x, in.x_stride.t, cursor.tokens(chunk), in.P);
            }
            x += CHUNK * in.x_stride.t;
            cp_async_commit();
        };
        /* Copies z of a chunk.  The consumers already work on this chunk, while the producer prepares the next one. */
        const auto load_gate = [&](int chunk) {
            if constexpr (Tile::LATER > Tile::X_AHEAD) {
                if (copies_gate && chunk >= 0) {
                    copy_units(of_units, cursor, 1, smem + Tile::GATE, static_cast<const T*>(in.z), z, in.z_stride.t,
                               cursor.tokens(chunk), in.P);
                    z += CHUNK * in.z_stride.t;
                    cp_async_arrive(typename Tile::Gate{smem}.full(0));
                }
                cp_async_commit();
            }
        };
        load_times(0);
        if constexpr (Tile::B_AHEAD)
            load_group(0, n); /* the stage is free: it held chunk n - 3, whose products have ended */
        if constexpr (Tile::X_AHEAD) load_x(0, n);
        GT_NO_UNROLL
        for (int chunk = 0; chunk < chunks; chunk++, n++) {
            const int stage = n % 2, tokens = cursor.tokens(chunk);
            const uint32_t B_tile = smem + Tile::B + n % Tile::B_STAGES * Tile::TILE_B,
                           C_tile = smem + Tile::C + n % Tile::B_STAGES * Tile::TILE_B;
            const uint32_t x_tile = smem + Tile::X + (n % Tile::X_STAGES * UNITS + unit) * Tile::TILE_X;
            const uint32_t addresses = smem + Tile::FACTORS + 4 * Merged::COUNT * (stage * UNITS + unit);
            const uint32_t prepared = smem + Tile::PREPARED + 4 * Prepared::COUNT * (stage * UNITS + unit);
            ring.wait_free(n);
            if constexpr (!Tile::X_AHEAD) load_x(chunk, n);
            load_group(chunk + Tile::B_AHEAD, n + Tile::B_AHEAD);
            load_gate(chunk - 1);
            const auto factors = [&] {
                const float delta[2] = {of_unit.delta(in, 0, tokens), of_unit.delta(in, 1, tokens)};
                load_times(chunk + 1);
                make_factors(addresses, delta, of_unit.A);
            };
            if constexpr (Tile::B_AHEAD) { /* all copies of this chunk were issued during the previous chunk */
                load_x(chunk + 1, n + 1);
                cp_async_wait<Tile::LATER + 1>();
                bar_sync(BARRIER, WARPGROUP);
                if (makes_factors)
                    factors();
                else
                    prepare_beside_factors<Tile>(B_tile, C_tile, smem + Tile::B_INVERSE, x_tile,
                                                 prepared + 4 * Prepared::X_POWERS, warp);
            } else {
                if (makes_factors) factors();
                if constexpr (Tile::X_AHEAD) load_x(chunk + 1, n + 1);
                cp_async_wait<Tile::LATER + 1>();
                bar_sync(BARRIER, WARPGROUP);
                if constexpr (UNITS == 1)
                    row_maxima<T, 2>(x_tile, prepared + 4 * Prepared::X_POWERS, 16 * warp, 16);
                else if (finds_maxima)
                    row_maxima<T, 4>(x_tile, prepared + 4 * Prepared::X_POWERS, 0, CHUNK);
                cp_async_wait<Tile::LATER>();
                bar_sync(BARRIER, WARPGROUP);
                group_to_f16<Tile>(B_tile, smem + Tile::B_INVERSE, warp);
                group_to_f16<Tile>(C_tile, smem + Tile::C_INVERSE, warp);
            }
            bar_sync(BARRIER, WARPGROUP);
            if (makes_factors)
                finish_factors<Tile::NP>(addresses, prepared, lds<float2>(smem + Tile::B_INVERSE + 8 * own_lane()),
                                         lds<float2>(smem + Tile::C_INVERSE + 8 * own_lane()));
            fence_async_proxy();
            ring.fill(n);
        }
        if (copies_gate && chunks > 0) {
            ring.wait_free(n);
            load_gate(chunks - 1);
        }
        return cursor.item();
    });
}

/* ---- consumers --------------------------------------------------------------------------------------------------- */

/* Computes M of a unit from S and stores the warp's 16 rows t, block by block up to the diagonal.  A lane has rows 16
 * unit_warp + g and 8 rows later. */
GT_DEV void store_M_rows(uint32_t addresses, uint32_t M, int unit_warp, const float (&S)[8][4]) {
    const int lane = own_lane(), g = lane / 4, j = lane % 4, t = BLOCK * unit_warp + g;
    const auto value = [&](int at) { return lds<float>(addresses + 4 * at); };
    const auto two = [&](int at) { return lds<float2>(addresses + 4 * at); };
    const uint32_t to = by_rows<64>(M, own_lane());
    const float row[2] = {value(Merged::ROW + t), value(Merged::ROW + t + 8)};
    const int columns = Merged::column(unit_warp) + 2 * j;
    GT_UNROLL
    for (int sb = 0; sb < BLOCKS; sb++) {
        if (sb > unit_warp) break;
        const float(&low)[4] = S[2 * sb], (&high)[4] = S[2 * sb + 1];
        uint32_t pairs[4]; /* columns + 0 of rows + 0 and rows + 8; then columns + 8 of both */
        if (sb < unit_warp) {
            const float2 first = two(columns + BLOCK * sb), second = two(columns + BLOCK * sb + 8);
            pairs[0] = pack_f16(low[0] * (row[0] * first.x), low[1] * (row[0] * first.y));
            pairs[1] = pack_f16(low[2] * (row[1] * first.x), low[3] * (row[1] * first.y));
            pairs[2] = pack_f16(high[0] * (row[0] * second.x), high[1] * (row[0] * second.y));
            pairs[3] = pack_f16(high[2] * (row[1] * second.x), high[3] * (row[1] * second.y));
        } else {
            const int s = BLOCK * sb + 2 * j;
            const float2 upper = two(Merged::DIAGONAL + 8 * t + 2 * j),
                         lower = two(Merged::DIAGONAL + 8 * (t + 8) + 2 * j);
            const float2 right[2] = {two(Merged::RIGHT + s), two(Merged::RIGHT + s + 8)},
                         corner = two(Merged::HALF + s);
            const float left[2] = {value(Merged::LEFT + t), value(Merged::LEFT + t + 8)};
            const float below = value(Merged::HALF + t + 8);
            pairs[0] =
                pack_f16(low[0] * (left[0] * (right[0].x * upper.x)), low[1] * (left[0] * (right[0].y * upper.y)));
            pairs[1] = pack_f16(low[2] * (below * corner.x), low[3] * (below * corner.y));
            pairs[2] = 0;
            pairs[3] =
                pack_f16(high[2] * (left[1] * (right[1].x * lower.x)), high[3] * (left[1] * (right[1].y * lower.y)));
        }
        stmatrix_x4(block_at<64>(to, unit_warp, sb), pairs);
    }
}

/* Fills the warp's rows of M with zeros, from block `first` of columns on.  store_M_rows() does not write above the
 * diagonal, so these zeros stay. */
GT_DEV void clear_pairs(uint32_t M, int unit_warp, int first) {
    const uint32_t to = by_rows<64>(M, own_lane());
    const uint32_t zeros[4] = {0, 0, 0, 0};
    for (int sb = first; sb < BLOCKS; sb++) stmatrix_x4(block_at<64>(to, unit_warp, sb), zeros);
}

/* Multiplies y of 16 tokens by silu(z), or by silu'(z) dy if MAKES_DZ.  z, dy: the lane's addresses for ldmatrix in the
 * tiles. */
template <class T, bool MAKES_DZ>
GT_DEV void apply_gate(uint32_t z, uint32_t dy, float (&first)[4], float (&second)[4]) {
    using E = Element<T>;
    uint32_t pairs[4], others[4];
    ldmatrix_x4_trans(pairs, z);
    if constexpr (MAKES_DZ) ldmatrix_x4_trans(others, dy);
    GT_UNROLL
    for (int e = 0; e < 4; e++) { /* e / 2: 8 tokens later; e % 2: 8 rows later */
        const float2 gate = {E::lo(pairs[e]), E::hi(pairs[e])};
        float* y = (e < 2 ? &first[0] : &second[0]) + e % 2 * 2; /* gcc 12 would copy the arrays if ?: chose between
                                                                  * them */
        if constexpr (MAKES_DZ) {
            y[0] = y[0] * silu_derivative(gate.x, sigmoid_fast(gate.x)) * E::lo(others[e]);
            y[1] = y[1] * silu_derivative(gate.y, sigmoid_fast(gate.y)) * E::hi(others[e]);
        } else {
            y[0] *= silu_of_sigmoid(gate.x, sigmoid_fast(gate.x));
            y[1] *= silu_of_sigmoid(gate.y, sigmoid_fast(gate.y));
        }
    }
}

/* finite() for a value that is not negative. */
GT_DEV float at_most_finite(float value) { return value > FLT_MAX ? FLT_MAX : value; }

template <class Tile>
struct Consumer : BundleConsumer<Tile> {
    using Base = BundleConsumer<Tile>;
    using Base::smem, Base::unit, Base::warpgroup;
    GT_METHOD uint32_t x(int n, int i) const {
        return smem + Tile::X + ((unsigned)made_here(n) % Tile::X_STAGES * Tile::UNITS + unit(i)) * Tile::TILE_X;
    }
    GT_METHOD uint32_t gate(int i) const { return smem + Tile::GATE + unit(i) * Tile::TILE_X; }
    /* For dz: the address of the warpgroup's tile of z (tensor 0) or dy (tensor 1). */
    GT_METHOD uint32_t own_gate(int tensor) const {
        return smem + Tile::GATE + (2 * warpgroup() + tensor) * Tile::TILE_X;
    }
    GT_METHOD uint32_t gate_at(int i) const { return smem + Tile::GATE_AT + 16 * unit(i); }
    GT_METHOD uint32_t M(int i) const { return smem + Tile::M + unit(i) * Tile::TILE_X; }
    GT_METHOD uint32_t B(int n) const {
        return smem + Tile::B + (unsigned)made_here(n) % Tile::B_STAGES * Tile::TILE_B;
    }
    GT_METHOD uint32_t C(int n) const {
        return smem + Tile::C + (unsigned)made_here(n) % Tile::B_STAGES * Tile::TILE_B;
    }
    GT_METHOD uint32_t addresses(int n, int i) const {
        return smem + Tile::FACTORS + 4 * Merged::COUNT * ((unsigned)made_here(n) % 2 * Tile::UNITS + unit(i));
    }
    GT_METHOD uint32_t prepared(int n, int i) const {
        return smem + Tile::PREPARED + 4 * Prepared::COUNT * ((unsigned)made_here(n) % 2 * Tile::UNITS + unit(i));
    }
};

/* Stores the consumer's states before a chunk as checkpoints.  A warp's 16 rows pass through its rows of M, which are
 * free now, 64 columns at a time.  The M of the consumer's units take turns: a bulk copy reads one of them while the
 * warp fills the next. */
template <class Tile>
GT_DEV void keep_states(const HopperForwardParams& p, const Consumer<Tile>& me, int chunk,
                        WarpState<Tile::NP> (&state)[Tile::CONSUMER_UNITS]) {
    constexpr int NP = Tile::NP, CONSUMER_UNITS = Tile::CONSUMER_UNITS, PIECES = NP < 64 ? NP / 8 : 8,
                  PARTS = NP / 8 / PIECES;
    constexpr int SLABS = (NP + SLAB - 1) / SLAB; /* the same for every N that runs as NP */
    const Problem& in = p.in;
    GT_UNROLL
    for (int i = 0; i < CONSUMER_UNITS; i++) {
        const GroupCursor<Tile::UNITS> cursor = me.cursor();
        const int unit = me.unit(i), unit_warp = me.unit_warp(), row0 = cursor.row0(unit) + 16 * unit_warp;
        if (!cursor.exists(unit)) continue; /* then later units do not exist, either */
        const int64_t slot = cursor.slot(unit, chunk);
        state[i].power.inverse = inverse_of(state[i].power.value);
        if (chunk / SLOT_CHUNKS % MEASURED_SLOTS == 0) state[i].measure();
        GT_UNROLL
        for (int part = 0; part < PARTS; part++) {
            const int number = i * PARTS + part;
            const uint32_t tile = me.M(number % CONSUMER_UNITS);
            if (number >= CONSUMER_UNITS) {
                bulk_wait_read<CONSUMER_UNITS - 1>();
                sync_warp();
            }
            const uint32_t address = by_rows<64>(tile, own_lane());
            store_accumulators<PIECES / 2>(
                state[i].H + part * PIECES, [&](int k) { return block_at<64>(address, unit_warp, k); }, pack_f16);
            fence_async_proxy();
            sync_warp();
            if (row0 < in.P)
                tile_store(p.checkpoint_map, 64 * part, row0, (int)slot, tile + panel_at<128>(16 * unit_warp, 0));
            bulk_commit();
        }
        if (lane_id() < SLABS && row0 < in.P)
            p.checkpoints.powers[(slot * row_tiles(in.P) + row0 / 16) * SLABS + lane_id()] = state[i].power.inverse;
    }
    bulk_wait_read<0>();
    sync_warp();
    /* Restores the zeros of M above the diagonal.  The checkpoints overwrote these zeros, and store_M_rows() does not
     * write there. */
    GT_UNROLL
    for (int i = 0; i < CONSUMER_UNITS; i++) clear_pairs(me.M(i), me.unit_warp(), me.unit_warp() + 1);
}

/* For dz: the warpgroup starts to copy z and dy for unit i of a chunk, if the chunk exists.  All four warps must have
 * read the tiles before. */
template <class Tile>
GT_DEV void copy_gate(const TensorParams& p, const Consumer<Tile>& me, int chunk, int i) {
    using T = typename Tile::T;
    const Problem& in = p.in;
    const int tokens = me.cursor().tokens(chunk);
    if (tokens <= 0) return;
    const int row = own_thread() % WARPGROUP / 8, column = 8 * (own_lane() % 8);
    const int left = me.cursor().row0(me.unit(i)) + column < in.P ? tokens - row : 0;
    const uint32_t address = panel_at<128>(row, column / 8);
    const auto copy = [&](int tensor, const void* data, int64_t pitch) {
        const int64_t first = lds<int64_t>(me.gate_at(i) + 8 * tensor) + (int64_t)chunk * CHUNK * pitch + column;
        const T* const all = static_cast<const T*>(data) + first;
        const T* from = all + row * pitch;
        GT_UNROLL
        for (int k = 0; k < 4; k++) {
            const bool exists = 16 * k < left;
            cp_async<16>(me.own_gate(tensor) + address + 16 * 128 * k, exists ? from : static_cast<const T*>(data),
                         exists ? 16 : 0);
            from += 16 * pitch;
        }
    };
    copy(0, in.z, in.z_stride.t);
    copy(1, in.dy, in.dy_stride.t);
    cp_async_commit();
}

/* The accumulators for the sums of an update: the registers of y if the shapes agree, else the second array. */
GT_DEV float (&sums_of(float (&y)[8][4], float (&)[8][4]))[8][4] { return y; }
template <int WIDTH>
GT_DEV float (&sums_of(float (&)[8][4], float (&few)[WIDTH][4]))[WIDTH][4] {
    return few;
}

/* Runs one chunk for unit i of a consumer: y overwrites the unit's tile of x, and the state advances. */
template <class Tile>
GT_DEV void forward_unit(const TensorParams& p, const Consumer<Tile>& me, int chunk, int n, int i, float (&y)[8][4],
                         WarpState<Tile::NP>& state) {
    using T = typename Tile::T;
    using E = Element<T>;
    const GroupCursor<Tile::UNITS> cursor = me.cursor();
    const int unit = me.unit(i), unit_warp = me.unit_warp();
    const uint32_t addresses = me.addresses(n, i), weights = me.prepared(n, i);
    constexpr int NP = Tile::NP, ROW = Tile::ROW, PANEL = Tile::PANEL;
    constexpr int STEPS = NP / 16, AT_ONCE = STEPS < 4 ? STEPS : 4; /* all of H, packed, does not fit in registers */
    const Problem& in = p.in;
    const int j = own_lane() % 4;
    const uint64_t C = wgmma_tile<ROW, Major::K>(me.C(n), PANEL), B = wgmma_tile<ROW, Major::MN>(me.B(n), PANEL),
                   M = wgmma_tile<128, Major::K>(me.M(i));
    const float undo = inverse_of(state.power.value); /* computed again in each chunk, which saves a register */
    /* y^T = H C^T, 64 columns of H at a time.  If more registers held packed H, ptxas would serialize the products
     * (warning C7512). */
    uint32_t H[AT_ONCE][4];
    GT_UNROLL
    for (int k0 = 0; k0 < STEPS; k0 += AT_ONCE) {
        GT_UNROLL
        for (int k = 0; k < AT_ONCE; k++) {
            GT_UNROLL
            for (int e = 0; e < 4; e++) {
                const float(&from)[4] = state.H[2 * (k0 + k) + e / 2];
                H[k][e] = pack_f16(from[e % 2 * 2], from[e % 2 * 2 + 1]);
            }
        }
        wgmma_fence();
        GT_UNROLL
        for (int k = 0; k < AT_ONCE; k++)
            wgmma<f16>(y, H[k], operand_step(C, k_bytes<ROW, Major::K>(16 * (k0 + k), PANEL)), k0 + k > 0);
        wgmma_commit();
        if (k0 + AT_ONCE < STEPS) wgmma_wait<0>();
    }
    /* The factors of y are computed while the last products run.  y is summed with the power of M.  If the state's part
     * of y would overflow, y is summed with a smaller power; then the part from M is negligible. */
    const float inverse = lds<float>(weights + 4 * Weights::PAIRS);
    const float fits = power_of(finite(state.bound * lds<float>(weights + 4 * Prepared::FROM_STATES))).value * 0x1p106f;
    const float power = fminf(inverse_of(inverse), fits), for_x = power * inverse, unscale = inverse_of(power);
    const uint32_t own = addresses + 4 * (Merged::OWN + 2 * CHUNK * unit_warp), own_powers = own + 4 * CHUNK;
    { /* each lane computes the factors of two tokens */
        const int t = 2 * own_lane();
        const float2 pre = lds<float2>(addresses + 4 * (Merged::PRE + t));
        const float2 x_power = lds<float2>(weights + 4 * (Prepared::X_POWERS + t));
        sts<float2>(own + 4 * t, {at_most_finite(pre.x * undo) * power, at_most_finite(pre.y * undo) * power});
        sts<float2>(own_powers + 4 * t, {x_power.x * for_x, x_power.y * for_x});
        sync_warp();
    }
    wgmma_wait<0>();
    wgmma_pin(y);
    uint32_t x[BLOCKS][4];
    const uint32_t columns = by_columns<64>(me.x(n, i), own_lane());
    GT_UNROLL
    for (int k = 0; k < BLOCKS; k++) ldmatrix_x4_trans(x[k], block_at<64>(columns, k, unit_warp));
    GT_UNROLL
    for (int i = 0; i < 8; i++) {
        const float2 factor = lds<float2>(own + 4 * (8 * i + 2 * j));
        y[i][0] *= factor.x, y[i][1] *= factor.y, y[i][2] *= factor.x, y[i][3] *= factor.y;
    }
    GT_UNROLL
    for (int k = 0; k < BLOCKS; k++) { /* converts x to f16 */
        const float2 low = lds<float2>(own_powers + 4 * (16 * k + 2 * j)),
                     high = lds<float2>(own_powers + 4 * (16 * k + 8 + 2 * j));
        GT_UNROLL
        for (int e = 0; e < 4; e++)
            x[k][e] = pack_f16(E::lo(x[k][e]) * (e < 2 ? low.x : high.x), E::hi(x[k][e]) * (e < 2 ? low.y : high.y));
    }
    wgmma_pin(y);
    wgmma_fence();
    GT_UNROLL
    for (int k = 0; k < BLOCKS; k++) wgmma<f16>(y, x[k], operand_step(M, k_bytes<128, Major::K>(16 * k)));
    wgmma_commit();
    const int row0 = cursor.row0(unit) + 16 * unit_warp;
    const bool gated = Tile::HAS_GATE && in.z;
    const float2 added_up = lds<float2>(weights + 4 * Weights::INVERSE);
    const float decay = chunk_decay(addresses);
    state.bound = finite(decay * state.bound + added_up.y);
    state.power.value = power_of(state.bound).value;
    const float factor = finite(decay * undo) * state.power.value, scale = added_up.x * state.power.value;
    wgmma_wait<0>();
    wgmma_pin(y);
    float skip[2] = {0.0f, 0.0f};
    if (in.Dskip && in.skip_per_channel) {
        const float* from = in.Dskip + (int64_t)cursor.head(unit) * in.P;
        const int row = row0 + own_lane() / 4, next = row + 8;
        skip[0] = row < in.P ? from[row] : 0.0f;
        skip[1] = next < in.P ? from[next] : 0.0f;
    } else {
        skip[0] = skip[1] = cursor.number(unit);
    }
    uint32_t v[BLOCKS][4];
    if constexpr (Tile::MAKES_DZ) {
        cp_async_wait<0>();
        me.wait(); /* z and dy have arrived */
    } else if (gated && i == 0) {
        typename Tile::Gate{me.smem}.wait_full(made_here(n));
    }
    GT_UNROLL
    for (int k = 0; k < BLOCKS; k++) {
        const float2 low = lds<float2>(weights + 4 * (16 * k + 2 * j)),
                     high = lds<float2>(weights + 4 * (16 * k + 8 + 2 * j));
        ldmatrix_x4_trans(x[k], block_at<64>(columns, k, unit_warp)); /* x as loaded, not converted */
        GT_UNROLL
        for (int e = 0; e < 4; e++) { /* e / 2: 8 tokens later; e % 2: 8 rows later */
            const float2 pair = {E::lo(x[k][e]), E::hi(x[k][e])};
            v[k][e] = pack_f16(pair.x * (e < 2 ? low.x : high.x), pair.y * (e < 2 ? low.y : high.y));
            float* to = &y[2 * k + e / 2][e % 2 * 2];
            to[0] = fma_rn(to[0], unscale, skip[e % 2] * pair.x);
            to[1] = fma_rn(to[1], unscale, skip[e % 2] * pair.y);
        }
        if (gated) {
            const uint32_t tile = Tile::MAKES_DZ ? me.own_gate(0) : me.gate(i),
                           z = block_at<64>(by_columns<64>(tile, own_lane()), k, unit_warp);
            apply_gate<T, Tile::MAKES_DZ>(z, z + Tile::TILE_X, y[2 * k], y[2 * k + 1]);
        }
        const uint32_t out[4] = {E::pack(y[2 * k][0], y[2 * k][1]), E::pack(y[2 * k][2], y[2 * k][3]),
                                 E::pack(y[2 * k + 1][0], y[2 * k + 1][1]), E::pack(y[2 * k + 1][2], y[2 * k + 1][3])};
        sync_warp(); /* other lanes have read x from where this lane stores */
        stmatrix_x4_trans(block_at<64>(columns, k, unit_warp), out);
    }
    constexpr int WIDTH = NP / 8 < 8 ? NP / 8 : 8;
    GT_UNROLL
    for (int n0 = 0; n0 < NP / 8; n0 += WIDTH) {
        float few[WIDTH][4];
        float(&added)[WIDTH][4] = sums_of(y, few);
        wgmma_fence();
        GT_UNROLL
        for (int k = 0; k < BLOCKS; k++)
            wgmma<f16, Major::MN>(
                added, v[k],
                operand_step(B, k_bytes<ROW, Major::MN>(16 * k, PANEL) + mn_bytes<ROW, Major::MN>(8 * n0, PANEL)),
                k > 0);
        wgmma_commit();
        if (Tile::MAKES_DZ && n0 == 0) {
            me.wait(); /* the four warps have read z and dy */
            copy_gate<Tile>(p, me, chunk + (i + 1) / Tile::CONSUMER_UNITS, (i + 1) % Tile::CONSUMER_UNITS);
        }
        wgmma_wait<0>();
        wgmma_pin(added);
        GT_UNROLL
        for (int i = 0; i < WIDTH * 4; i++) {
            float& to = state.H[n0 + i / 4][i % 4];
            to = fma_rn(added[i / 4][i % 4], scale, to * factor);
        }
    }
}

/* The warpgroup copies up to 64 rows of y from a tile to global memory.  to: the first row.  rows, columns: how many
 * exist. */
template <class T>
GT_DEV void store_rows(uint32_t tile, T* to, int64_t pitch, int rows, int columns) {
    const int thread = own_thread() % WARPGROUP, row0 = thread / 8, piece = thread % 8;
    const uint32_t from = tile + panel_at<128>(row0, piece);
    char* at = reinterpret_cast<char*>(to + row0 * pitch) + 16 * piece;
    const int64_t step = 16 * sizeof(T) * pitch;
    const int left = 8 * piece < columns ? rows - row0 : 0;
    GT_UNROLL
    for (int k = 0; k < 4; k++) {
        const uint4 values = lds<uint4>(from + 16 * 128 * k);
        if (16 * k < left) stg<uint4>(at, values);
        at += step;
    }
}

/* Stores the consumer's states to a row of fp32 states, unless `to` is NULL. */
template <class Tile>
GT_DEV void store_states(const Consumer<Tile>& me, const Problem& in, float* to,
                         WarpState<Tile::NP> (&state)[Tile::CONSUMER_UNITS]) {
    if (!to) return;
    GT_UNROLL
    for (int i = 0; i < Tile::CONSUMER_UNITS; i++) {
        const GroupCursor<Tile::UNITS> cursor = me.cursor();
        const int unit = me.unit(i);
        if (!cursor.exists(unit)) continue;
        state[i].power.inverse = inverse_of(state[i].power.value);
        state[i].store(to + cursor.state(in, unit, 0), cursor.row0(unit) + 16 * me.unit_warp(), in);
    }
}

template <class Tile>
GT_DEV void forward_consumer(const HopperForwardParams& p, uint32_t smem) {
    using T = typename Tile::T;
    constexpr int NP = Tile::NP, ROW = Tile::ROW, PANEL = Tile::PANEL, CONSUMER_UNITS = Tile::CONSUMER_UNITS;
    const Problem& in = p.in;
    const Consumer<Tile> me = {smem};
    const typename Tile::Chunks ring = {smem};
    GT_UNROLL
    for (int i = 0; i < CONSUMER_UNITS; i++) /* if NP < 64, bulk copies of checkpoints read columns of M that no warp
                                              * writes */
        clear_pairs(me.M(i), me.unit_warp(), NP < 64 ? 0 : me.unit_warp() + 1);
    int n = 0; /* counts chunks over all segments */
    each_bundle_item(in, [&](const Span& span, int64_t item) {
        WarpState<NP> state[CONSUMER_UNITS];
        if (!span.exists) return item;
        me.cursor().enter(in, span, item, 2 + me.warpgroup(), [&] {
            me.cursor().put_offsets(0, p.y_stride);
            for (int i = 0; i < Tile::UNITS; i++) /* keeps Dskip if it is per head */
                me.cursor().put_number(i, in.Dskip && !in.skip_per_channel ? in.Dskip[me.cursor().head(i)] : 0.0f);
            if (Tile::MAKES_DZ) {
                const GroupCursor<Tile::UNITS> cursor = me.cursor();
                for (int i = 0; i < CONSUMER_UNITS; i++) {
                    const int head = cursor.head(me.unit(i)), row0 = cursor.row0(me.unit(i));
                    const auto put = [&](int tensor, const gt_stride& stride) {
                        sts<int64_t>(me.gate_at(i) + 8 * tensor,
                                     offset_of(stride, cursor.b(), cursor.token(0), head) + row0);
                    };
                    put(0, in.z_stride);
                    put(1, in.dy_stride);
                }
            }
        });
        if (Tile::MAKES_DZ) copy_gate<Tile>(p, me, 0, 0);
        const float* start = first_state(in, span, p.state_in, p.state_in_shared ? 0 : span.sequence);
        GT_UNROLL
        for (int i = 0; i < CONSUMER_UNITS; i++)
            state[i].load(start ? start + me.cursor().state(in, me.unit(i), 0) : nullptr,
                          me.cursor().row0(me.unit(i)) + 16 * me.unit_warp(), in);
        [[maybe_unused]] const int count = me.cursor().chunks();
        const auto chunks = [&] { /* with two states of 128 columns, keeping the count would spill one more register */
                                  if constexpr (CONSUMER_UNITS * NP > 128)
                                      return me.cursor().chunks();
                                  else
                                      return count;
        };
        /* Returns whether y of a chunk is stored through the tensor map.  One warp per unit starts such a store.
         * Without a map, and for a short last chunk of a packed sequence, threads store y row by row. */
        const auto by_map = [&](int chunk) {
            return p.has_y_map &&
                   (chunk + 1 < chunks() || !in.sequences.cu_seqlens || me.cursor().tokens(chunk) == CHUNK);
        };
        const auto start_y = [&](int chunk, int number) {
            const int i = me.unit_warp();
            if (i >= CONSUMER_UNITS || !by_map(chunk)) return;
            const GroupCursor<Tile::UNITS> cursor = me.cursor();
            if (!cursor.exists(me.unit(i))) return;
            const int unit = me.unit(i);
            tile_store(p.y_map, cursor.head(unit) * in.P + cursor.row0(unit), (int)cursor.token(chunk), (int)cursor.b(),
                       me.x(number, i));
            bulk_commit();
        };
        const auto finish_y = [&](int chunk, int number) {
            if (by_map(chunk)) {
                if (me.unit_warp() < CONSUMER_UNITS) bulk_wait_read<0>();
            } else {
                const int tokens = me.cursor().tokens(chunk);
                const int64_t first = (int64_t)chunk * CHUNK * p.y_stride.t;
                GT_NO_UNROLL
                for (int i = 0; i < CONSUMER_UNITS; i++) {
                    const GroupCursor<Tile::UNITS> cursor = me.cursor();
                    const int unit = me.unit(i);
                    if (!cursor.exists(unit)) continue;
                    store_rows(me.x(number, i), static_cast<T*>(p.y) + (cursor.offset(0, unit) + first), p.y_stride.t,
                               tokens, in.P - cursor.row0(unit));
                }
            }
            typename Tile::Rows{smem}.free((unsigned)number);
        };
        /* S, y and the sums use the same registers in turn, because separate arrays would make ptxas spill */
        float S[8][4] = {};
        GT_NO_UNROLL
        for (int chunk = 0; chunk < chunks(); chunk++, n++) {
            if (Tile::HAS_SNAPSHOTS && p.snapshots.data && chunk > 0 && chunk % SLOT_CHUNKS == 0)
                store_states(me, in, snapshot_row(in, p.snapshots, ordered_span(in, me.cursor().item()), chunk * CHUNK),
                             state);
            ring.wait_full(n);
            const uint64_t left = wgmma_tile<ROW, Major::K>(me.C(n), PANEL),
                           right = wgmma_tile<ROW, Major::K>(me.B(n), PANEL);
            wgmma_fence();
            GT_UNROLL
            for (int k = 0; k < NP / 16; k++) {
                const uint32_t bytes = k_bytes<ROW, Major::K>(16 * k, PANEL);
                wgmma<f16>(S, operand_step(left, bytes), operand_step(right, bytes), k > 0);
            }
            wgmma_commit();
            /* the next lines overlap with these products */
            if (chunk > 0) {
                if (Tile::STORES_LATE && by_map(chunk - 1))
                    start_y(chunk - 1, n - 1);
                else
                    finish_y(chunk - 1, n - 1);
            }
            if (p.checkpoints.values && chunk % SLOT_CHUNKS == 0) keep_states<Tile>(p, me, chunk, state);
            wgmma_wait<0>();
            wgmma_pin(S);
            GT_UNROLL
            for (int i = 0; i < CONSUMER_UNITS; i++) store_M_rows(me.addresses(n, i), me.M(i), me.unit_warp(), S);
            if (Tile::STORES_LATE && chunk > 0 && by_map(chunk - 1)) finish_y(chunk - 1, n - 1);
            fence_async_proxy();
            me.wait();
            GT_UNROLL
            for (int i = 0; i < CONSUMER_UNITS; i++) {
                [[maybe_unused]] float y[8][4];
                if constexpr (CONSUMER_UNITS * NP > 128)
                    forward_unit<Tile>(p, me, chunk, n, i, S, state[i]);
                else
                    forward_unit<Tile>(p, me, chunk, n, i, y, state[i]);
            }
            ring.free(n);
            fence_async_proxy();
            me.wait(); /* all warps have stored y in its tile and have read M */
            if (!Tile::STORES_LATE) start_y(chunk, n);
        }
        if (const int last = chunks()) {
            if (Tile::STORES_LATE) start_y(last - 1, n - 1);
            finish_y(last - 1, n - 1);
        }
        item = me.cursor().item();
        /* computed again, because no registers are left to keep it */
        const Span same = ordered_span(in, item);
        if (Tile::HAS_SNAPSHOTS && p.snapshots.data)
            store_states(me, in, snapshot_row(in, p.snapshots, same, INT32_MAX), state);
        store_states(me, in, same.ends ? last_state(in, p.state_out, same.sequence) : nullptr, state);
        return item;
    });
}

/* For other architectures the kernel has no code and launch bounds of one warp.  Device::runs_sm90a finds out which
 * code the device runs. */
template <class T, int NP, int UNITS, int GATE>
GT_KERNEL(GT_SM90A ? (HopperTile<T, NP, UNITS, GATE>::THREADS) : 32, (HopperTile<T, NP, UNITS, GATE>::FIT))
forward_hopper_kernel(const GT_GRID_CONSTANT HopperForwardParams p) {
#if GT_SM90A
    using Tile = HopperTile<T, NP, UNITS, GATE>;
    const uint32_t smem = smem_base_of_tiles();
    constexpr int USERS = Tile::CONSUMERS * WARPGROUP;
    typename Tile::Chunks{smem}.init(thread_id(), WARPGROUP, USERS);
    typename Tile::Gate{smem}.init(thread_id(), WARPGROUP);
    typename Tile::Rows{smem}.init(thread_id(), 0, USERS);
    sync_threads();
    run_chained_roles<Tile>([&] { return p.in.order != nullptr; }, [&] { return is_apart(p.in) && !Tile::MAKES_DZ; },
                            [&] { forward_producer<Tile>(p, smem); }, [&] { forward_consumer<Tile>(p, smem); });
#else
    (void)p;
    __trap();
#endif
}

} /* namespace ssd */
} /* namespace gt */

#endif
