/* Compares the declarations of hybrid_nccl.h with NCCL's own header, at compile time. */
#include <nccl.h>

#include <cstddef>
#include <type_traits>

#include "hybrid_nccl.h"

/* Whether a value of type A can be passed as a value of type B: sizes are equal, and both are pointers, both integers
 * or enums, or both structs. */
template <class A, class B>
constexpr bool passes_as() {
    constexpr bool numbers =
        (std::is_integral<A>() || std::is_enum<A>()) && (std::is_integral<B>() || std::is_enum<B>());
    return sizeof(A) == sizeof(B) &&
           ((std::is_pointer<A>() && std::is_pointer<B>()) || numbers || (std::is_class<A>() && std::is_class<B>()));
}

template <class A, class B>
struct SameCall : std::false_type {};
template <class R, class... Args, class S, class... Others>
struct SameCall<R (*)(Args...), S (*)(Others...)> {
    template <bool IS_SAME_COUNT, class = void>
    struct Check : std::false_type {};
    template <class Unused>
    struct Check<true, Unused> : std::integral_constant<bool, (passes_as<R, S>() && ... && passes_as<Args, Others>())> {
    };
    static constexpr bool value = Check<sizeof...(Args) == sizeof...(Others)>::value;
};

#define CHECK_CALL(name) static_assert(SameCall<decltype(hy_nccl_functions::name), decltype(&nccl##name)>::value, #name)
CHECK_CALL(GetVersion);
CHECK_CALL(GetUniqueId);
CHECK_CALL(CommInitRank);
CHECK_CALL(CommDestroy);
CHECK_CALL(CommAbort);
CHECK_CALL(CommGetAsyncError);
CHECK_CALL(RedOpCreatePreMulSum);
CHECK_CALL(AllReduce);
CHECK_CALL(GetErrorString);

static_assert(sizeof(hy_nccl_id) == sizeof(ncclUniqueId) && alignof(hy_nccl_id) == alignof(ncclUniqueId), "id");
static_assert(offsetof(hy_nccl_id, bytes) == offsetof(ncclUniqueId, internal), "id");
static_assert(HY_NCCL_ID_BYTES == NCCL_UNIQUE_ID_BYTES, "id");
static_assert((int)HY_NCCL_SUCCESS == (int)ncclSuccess, "success");
static_assert((int)HY_NCCL_IN_PROGRESS == (int)ncclInProgress, "in progress");
static_assert((int)HY_NCCL_FLOAT32 == (int)ncclFloat32, "float");
static_assert((int)HY_NCCL_SUM == (int)ncclSum, "sum");
static_assert((int)HY_NCCL_HOST_NUMBER == (int)ncclScalarHostImmediate, "host number");

/* SameCall must refuse functions with other parameters. */
static_assert(!SameCall<int (*)(void*), int (*)(void*, int)>::value, "count");
static_assert(!SameCall<int (*)(long), int (*)(int)>::value, "size");
static_assert(!SameCall<int (*)(void*), int (*)(size_t)>::value, "kind");

int main() { return 0; }
