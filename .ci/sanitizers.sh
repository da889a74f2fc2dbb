# .ci/run and .ci/long source this file.  It sets the sanitizers' options.  A program in the folder $probe tells it
# whether leaks can be detected here.
export ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
mkdir -p "$probe"
if ! { echo 'int main(void) { return 0; }' | cc -fsanitize=address -x c - -o "$probe/leak_probe" &&
    "$probe/leak_probe"; }; then
    echo 'leaks cannot be detected on this machine'
    export ASAN_OPTIONS=detect_leaks=0
fi
