/* gt/recurrence/small_states.cuh - forward with states of 16 bits.
 *
 * The kernels of forward take only fp32 states.  So a call with 16-bit states makes two more launches.  Before forward,
 * load_states_kernel converts the first states to fp32 rows in workspace.  After forward, store_states_kernel rounds
 * the last states from these rows to 16 bits.  Together they move 12 bytes for each number of a state, little compared
 * with the tokens of a prefill. */
#ifndef GT_RECURRENCE_SMALL_STATES_CUH
#define GT_RECURRENCE_SMALL_STATES_CUH

#include "snapshots.cuh"
#include "step_states.cuh"

namespace gt {

/* A state of a sequence has `rows` rows of `columns` numbers. */
struct StateShape {
    int64_t rows, columns;
};

/* load_states_kernel: wide <- in.  store_states_kernel: out <- wide, rounded.
 * grid: at most 16 blocks per multiprocessor.  block: 8 warps.  Blocks take tiles of states in turn.  A tile has
 * STATE_TILE groups of four numbers, STATE_PIECES groups for each thread.  No shared memory.
 * bytes: 6 for each number of a state, in each of the two kernels. */
struct SmallStatesParams {
    Sequences sequences;
    const void* in; /* the caller's states: one row for each sequence, or rows of a pool; NULL: not given */
    void* out;
    float* wide;    /* [count][wide_stride] */
    int32_t* slots; /* [count]; slots[s] = s, or -1 if sequence s has no row in the pool.  NULL: no pool */
    gt_dtype dtype;
    StateShape shape;
    int64_t count;               /* number of sequences, or 1 if all share a state */
    int64_t stride, wide_stride; /* elements from row to row: of the caller's states; of `wide` */
    StepRounding rounding;
};

enum { STATE_PIECES = 4, STATE_TILE = 256 * STATE_PIECES };

GT_HD int64_t state_groups(const StateShape& shape) { return shape.rows * gt_row_groups(shape.columns); }
GT_HD int64_t state_tiles(const StateShape& shape) { return (state_groups(shape) + STATE_TILE - 1) / STATE_TILE; }

/* A tile of a state. */
template <bool VECTORS>
struct StateTile {
    StateShape shape;
    int64_t start; /* the tile's first group of four numbers */
    GT_METHOD int64_t element(int64_t group) const {
        if constexpr (VECTORS) return 4 * group;
        const int64_t row_groups = gt_row_groups(shape.columns);
        return group / row_groups * shape.columns + group % row_groups * 4;
    }
    GT_METHOD int64_t first() const { return element(start); }
    /* Returns the thread's piece i: the `where` of load_step_state() (step_states.cuh). */
    GT_METHOD StatePiece operator()(int i) const {
        const int64_t group = start + 256 * i + thread_id();
        StatePiece piece = {0, 0, (int)(group - start)};
        if (group >= state_groups(shape)) return piece;
        piece.offset = (int)(element(group) - first());
        const int64_t left = VECTORS ? 4 : shape.columns - group % gt_row_groups(shape.columns) * 4;
        piece.valid = left < 4 ? (int)left : 4;
        return piece;
    }
};

/* Calls take(s, row, tile) for the tiles of a block.  s is the sequence; row is its row in the caller's states, or
 * -1. */
template <bool VECTORS, class Take>
GT_DEV void each_state_tile(const SmallStatesParams& p, const Take& take) {
    const Sequences& q = p.sequences;
    const int64_t tiles = state_tiles(p.shape);
    for (int64_t item = block_x(); item < p.count * tiles; item += grid_x()) {
        const int64_t s = item / tiles;
        if (!sequence_exists(q, s)) return;
        take(s, q.pool.slots ? pool_row(q.pool, s) : s, StateTile<VECTORS>{p.shape, item % tiles * STATE_TILE});
    }
}

template <bool VECTORS>
GT_KERNEL(256, 2)
load_states_kernel(const GT_GRID_CONSTANT SmallStatesParams p) {
    each_state_tile<VECTORS>(p, [&](int64_t s, int64_t row, const StateTile<VECTORS>& tile) {
        const int32_t* const zeros = p.sequences.pool.starts_zero;
        float x[4 * STATE_PIECES];
        if (p.slots && tile.start == 0 && thread_id() == 0) p.slots[s] = row < 0 ? -1 : (int32_t)s;
        if (!p.in || row < 0 || (p.slots && zeros && zeros[s])) return;
        const StepState from = {const_cast<void*>(p.in), p.dtype, row * p.stride + tile.first()};
        const StepState to = {p.wide, GT_F32, s * p.wide_stride + tile.first()};
        load_step_state<VECTORS, STATE_PIECES>(x, from, tile);
        store_step_state<VECTORS, STATE_PIECES>(to, x, tile, StepRounding(), 0, 0);
    });
}

template <bool VECTORS>
GT_KERNEL(256, 2)
store_states_kernel(const GT_GRID_CONSTANT SmallStatesParams p) {
    each_state_tile<VECTORS>(p, [&](int64_t s, int64_t row, const StateTile<VECTORS>& tile) {
        float x[4 * STATE_PIECES];
        if (row < 0) return;
        const StepState from = {p.wide, GT_F32, s * p.wide_stride + tile.first()};
        const StepState to = {p.out, p.dtype, row * p.stride + tile.first()};
        load_step_state<VECTORS, STATE_PIECES>(x, from, tile);
        store_step_state<VECTORS, STATE_PIECES>(to, x, tile, p.rounding, s, tile.start);
    });
}

/* Rounds the snapshots of forward from fp32 to 16 bits: out <- snapshots.data.
 * grid, block, bytes: as store_states_kernel.  A block takes the same tile of all snapshots of a sequence. */
struct SmallSnapshotsParams : SmallStatesParams {
    Snapshots snapshots;
    int64_t every;
};

template <bool VECTORS>
GT_KERNEL(256, 2)
store_snapshots_kernel(const GT_GRID_CONSTANT SmallSnapshotsParams p) {
    each_state_tile<VECTORS>(p, [&](int64_t s, int64_t row, const StateTile<VECTORS>& tile) {
        const Sequences& q = p.sequences;
        const int64_t tokens = q.cu_seqlens ? q.cu_seqlens[s + 1] - q.cu_seqlens[s] : q.T;
        if (row < 0) return;
        for (int64_t done = p.every; done <= tokens; done += p.every) {
            const int64_t at = snapshot_number(q, p.snapshots, s, done) * p.stride + tile.first();
            float x[4 * STATE_PIECES];
            load_step_state<VECTORS, STATE_PIECES>(x, {p.snapshots.data, GT_F32, at}, tile);
            store_step_state<VECTORS, STATE_PIECES>({p.out, p.dtype, at}, x, tile, StepRounding(), 0, 0);
        }
    });
}

/* ---- host ---- */

template <class Params>
static inline gt_status run_states(const char* name, void (*vectors)(Params), void (*any)(Params), const Params& p,
                                   const Device& device, gt_stream stream) {
    const int64_t items = p.count * state_tiles(p.shape), room = 16 * (int64_t)device.multiprocessors;
    const bool is_aligned = p.shape.columns % 4 == 0 && p.stride % 4 == 0 && p.wide_stride % 4 == 0 &&
                            has_aligned_fours(p.in, p.dtype) && has_aligned_fours(p.out, p.dtype);
    return run(name, is_aligned ? vectors : any, items < room ? items : room, 256, 0, stream, p);
}

template <class Args>
static inline auto states_stride(const Args& a, int) -> decltype(a.state_out_stride) {
    return a.state_out_stride;
}
template <class Args>
static inline int64_t states_stride(const Args&, long) {
    return 0;
}
template <class Args>
static inline auto states_sequences(const Args& a, int) -> decltype(sequences_of(a, a.state_out_stride)) {
    return sequences_of(a, a.state_out_stride);
}
template <class Args>
static inline Sequences states_sequences(const Args& a, long) {
    return sequences_of(a);
}
template <class Args>
static inline auto use_wide_rows(Args& a, int64_t stride, int) -> decltype((void)a.state_out_stride) {
    a.state_out_stride = stride;
}
template <class Args>
static inline void use_wide_rows(Args&, int64_t, long) {}

/* Replaces the caller's 16-bit states in forward's arguments by fp32 states in workspace.  The first `bytes` bytes of
 * the caller's workspace hold these states; forward's kernels get the rest.  Without 16-bit states `args` are the
 * caller's arguments, and load() and store() do nothing.  In a size query the workspace is NULL. */
template <class Args>
class WideStates {
  public:
    Args args;
    size_t bytes = 0;

    WideStates() = default;
    WideStates(const Args& a, const StateShape& shape) : args(a) {
        is_needed_ = a.state_dtype == GT_BF16 || a.state_dtype == GT_F16;
        if (!is_needed_) return;
        const int64_t size = shape.rows * shape.columns, stride = states_stride(a, 0);
        /* Without slots forward takes only packed rows.  With slots the rows are padded, so that all are aligned. */
        const int64_t wide_stride = a.slots ? (size + 3) / 4 * 4 : size;
        p_.sequences = states_sequences(a, 0);
        p_.in = a.state_in, p_.out = a.state_out;
        p_.dtype = a.state_dtype, p_.shape = shape;
        p_.stride = stride ? stride : size;
        p_.wide_stride = wide_stride;
        p_.rounding = step_rounding_of(a);
        count_ = most_sequences(p_.sequences);
        is_shared_ = a.state_in_shared;
        Arena arena(a.workspace); /* sizes must not depend on pointers, because a query may lack them */
        wide_ = arena.take<float>((count_ + is_shared_) * ((size + 3) / 4 * 4));
        int32_t* const slots = arena.take<int32_t>(count_);
        p_.slots = a.slots ? slots : nullptr;
        bytes = arena.bytes();
        /* A query has no workspace yet.  It plans with a made-up address that is as aligned as the real rows. */
        float* const start = wide_ ? wide_ : reinterpret_cast<float*>((uintptr_t)1 << 32);
        args.state_in = a.state_in ? start + (is_shared_ ? count_ * wide_stride : 0) : nullptr;
        args.state_out = a.state_out ? start : nullptr;
        args.state_dtype = GT_F32;
        args.rounding_seed = args.rounding_steps = nullptr;
        if (a.workspace) args.workspace = static_cast<char*>(a.workspace) + bytes;
        if (!a.slots) return;
        args.slots = p_.slots ? p_.slots : a.slots;
        args.slot_capacity = count_;
        use_wide_rows(args, wide_stride, 0);
    }

    gt_status load(const Device& device, gt_stream stream) const {
        if (!is_needed_ || !(p_.in || p_.slots)) return GT_OK;
        SmallStatesParams p = p_;
        p.count = is_shared_ ? 1 : count_;
        if (is_shared_) p.sequences = Sequences(); /* the shared state is converted even if there is no sequence */
        p.wide = is_shared_ ? wide_ + count_ * p.wide_stride : wide_;
        return run_states("recurrence load_states_kernel", load_states_kernel<true>, load_states_kernel<false>, p,
                          device, stream);
    }

    gt_status store(const Device& device, gt_stream stream) const {
        if (!is_needed_ || !p_.out) return GT_OK;
        SmallStatesParams p = p_;
        p.count = count_;
        p.wide = wide_;
        return run_states("recurrence store_states_kernel", store_states_kernel<true>, store_states_kernel<false>, p,
                          device, stream);
    }

  private:
    bool is_needed_ = false, is_shared_ = false;
    SmallStatesParams p_ = {};
    int64_t count_ = 0;
    float* wide_ = nullptr;
};

/* The same for snapshots of 16 bits: forward's kernels store fp32 rows in workspace. */
template <class Args>
class WideSnapshots {
  public:
    Args args;
    size_t bytes = 0;

    WideSnapshots() = default;
    WideSnapshots(const Args& a, const StateShape& shape) : args(a) {
        if (a.snapshot_every == 0 || (a.snapshot_dtype != GT_BF16 && a.snapshot_dtype != GT_F16)) return;
        const int64_t size = shape.rows * shape.columns;
        p_.sequences = states_sequences(a, 0);
        p_.out = a.snapshots;
        p_.dtype = a.snapshot_dtype, p_.shape = shape;
        p_.stride = p_.wide_stride = size;
        p_.count = most_sequences(p_.sequences);
        p_.every = a.snapshot_every;
        Arena arena(a.workspace);
        float* const wide = arena.take<float>(a.B * (a.T / a.snapshot_every) * size);
        bytes = arena.bytes();
        args.snapshot_dtype = GT_F32;
        /* A query gets a made-up address, as in WideStates. */
        if (a.snapshots) args.snapshots = wide ? wide : reinterpret_cast<float*>((uintptr_t)1 << 32);
        if (a.workspace) args.workspace = static_cast<char*>(a.workspace) + bytes;
        p_.snapshots = snapshots_of(args);
    }

    gt_status store(const Device& device, gt_stream stream) const {
        if (!p_.out || !p_.snapshots.data) return GT_OK;
        return run_states<SmallSnapshotsParams>("recurrence store_snapshots_kernel", store_snapshots_kernel<true>,
                                                store_snapshots_kernel<false>, p_, device, stream);
    }

  private:
    SmallSnapshotsParams p_ = {};
};

/* The same interface for an operator that has only fp32 states, or no snapshots. */
template <class Args>
struct SameStates {
    Args args;
    size_t bytes = 0;
    SameStates(const Args& a, const StateShape&) : args(a) {}
    gt_status load(const Device&, gt_stream) const { return GT_OK; }
    gt_status store(const Device&, gt_stream) const { return GT_OK; }
};

} /* namespace gt */

#endif
