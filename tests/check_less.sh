# check_less.sh PART LIBRARY: checks a part that is compiled with GT_WITHOUT_ macros.  It must have kernels on tensor
# cores only for bf16 and one head size, and kernels for any size.
#     wkv6    without GT_WITHOUT_BF16 and _N32
#     ssm     without GT_WITHOUT_BF16 and _N64
set -eu
part=$1
names=$("$NM" -C "$2")
failures=0
has() { printf '%s\n' "$names" | grep -E "$1" >/dev/null; }
needs() { has "$1" || { failures=1 && echo "FAIL: the library has no $1"; }; }
lacks() {
    if has "$1"; then
        failures=1
        echo "FAIL: the library must not have $1, but has:"
        printf '%s\n' "$names" | grep -E "$1" | head -n 3
    fi
}
case $part in
wkv6)
    for kernel in forward_tensor_kernel states_tensor_kernel backward_tensor_kernel; do
        needs "$kernel<.*bf16, .*32"
        lacks "$kernel<[^<]*<(float|gt::f16), "
        lacks "$kernel<[^<]*<[a-z0-9:]*, [a-z0-9:]*, (64|128)"
    done
    lacks forward_hopper_kernel
    needs token_kernel
    needs 'step_kernel<.*StepTraits<32,'
    needs 'step_kernel<.*StepTraits<256,' # for any size
    lacks 'step_kernel<.*StepTraits<(64|128),'
    ;;
ssm)
    for kernel in forward_tensor_kernel states_tensor_kernel forward_hopper_kernel states_hopper_kernel \
        chunk_gradient_hopper_kernel; do
        needs "$kernel<gt::bf16, 64"
        lacks "$kernel<gt::f16"
        lacks "$kernel<gt::bf16, (16|32|128|256)"
    done
    needs 'chunk_gradient_kernel<64, '
    lacks 'chunk_gradient_kernel<(16|32|128), '
    lacks 'forward_maps_kernel|group_rows_kernel'
    lacks '(forward|states|chunk_gradient)_fp32_(hopper_)?kernel'
    # any size: kernels for N = 64 and, for every other N, for 256
    for kernel in forward_kernel backward_kernel reverse_states_kernel; do
        needs "ssd::$kernel<4, 4>"
        needs "ssd::$kernel<8, 8>"
        lacks "ssd::$kernel<[128], 4>"
        needs "scan::$kernel<16, 4, 4, false>"
        needs "scan::$kernel<32, 8, 2, false>"
        lacks "scan::$kernel<([48]|32), 4, 4, "
        lacks "scan::$kernel<[0-9, ]*true>"
    done
    lacks 'step_kernel<(float|gt::f16)'
    needs 'ssd::step_kernel<gt::bf16, 16, 1, 8'
    needs 'scan::step_kernel<gt::bf16, 16, 1'
    lacks 'step_kernel<[A-Za-z0-9:]*, (4|8), '
    ;;
esac
exit $failures
