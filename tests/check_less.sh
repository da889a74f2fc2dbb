# check_less.sh LIBRARY: wkv6 compiled with GT_WITHOUT_F32, _F16, _N64 and _N128 has tensor-core kernels for bf16 with
# N = 32 and no others, and those for any size.
set -eu
names=$("$NM" -C "$1")
failures=0
has() { printf '%s\n' "$names" | grep -E "$1" >/dev/null; }
lacks() {
    if has "$1"; then
        failures=1
        echo "FAIL: $1 is there:"
        printf '%s\n' "$names" | grep -E "$1" | head -n 3
    fi
}
for kernel in forward_tensor_kernel states_tensor_kernel backward_tensor_kernel; do
    has "$kernel<.*bf16, .*32" || { failures=1 && echo "FAIL: no $kernel for bf16 with N = 32"; }
    lacks "$kernel<[^<]*<(float|gt::f16), "
    lacks "$kernel<[^<]*<[a-z0-9:]*, [a-z0-9:]*, (64|128)"
done
lacks forward_hopper_kernel
has token_kernel || { failures=1 && echo 'FAIL: no kernels for any size'; }
exit $failures
