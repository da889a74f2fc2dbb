/* Tests of hybrid_train: options, data, gates, and whole runs of the program.
 *
 *     test_train PROGRAM            PROGRAM is the built hybrid_train
 *     test_train PROGRAM short      smaller batches, and no test that takes many steps
 *     test_train PROGRAM device     only tests of --device cuda; the program may be the one that
 *                                   emulates a GPU
 */
#define _XOPEN_SOURCE 700
#include "hybrid_config.h"
#include "hybrid_data.h"
#include "hybrid_gates.h"
#include "hybrid_limit.h"
#include "gpu_present.h"
#include "trainer.h"
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int is_short; /* leave out tests that take many steps */

/* ---- options -------------------------------------------------------------------------------- */

/* Parses the arguments of "hybrid_train LINE", and fills in the defaults of the CPU. */
static gt_status parse(hy_options *o, const char *line) {
    static char copy[4096];
    char *argv[ARGUMENTS_MAX];
    snprintf(copy, sizeof copy, "hybrid_train %s", line);
    gt_status status = hy_options_parse(o, split(copy, argv), argv);
    return status == GT_OK ? hy_options_default(o, 0) : status;
}

/* Whether the program refuses the line with a message that contains both texts. */
static int refused(const char *line, const char *text1, const char *text2) {
    hy_options o;
    if (parse(&o, line) == GT_OK) {
        printf("  accepted: %s\n", line);
        return 0;
    }
    if (strstr(hy_last_error(), text1) && strstr(hy_last_error(), text2)) return 1;
    printf("  '%s' gives: %s\n", line, hy_last_error());
    return 0;
}

static void test_options_defaults(void) {
    hy_options o, cuda;
    CHECK(parse(&o, "") == GT_OK);
    CHECK(o.steps > 0 && o.batch > 0 && o.seq > 0 && o.lr > 0 && o.min_lr == o.lr / 10);
    CHECK(!*o.data && !*o.csv && !o.stateful && !o.gates_strict && !o.help);
    CHECK(!strcmp(o.device, "auto"));
    CHECK(parse(&o, "--steps 2000 --lr 0.5") == GT_OK);
    CHECK(o.warmup == 100 && o.log_every == 100 && o.min_lr == 0.05);
    memset(&cuda, 0, sizeof cuda);
    CHECK(hy_options_default(&cuda, 1) == GT_OK);
    CHECK(!strcmp(cuda.model, "HY") && cuda.batch == 16 && cuda.seq == 128);
    CHECK(!strcmp(o.dtype, "f32") && !strcmp(cuda.dtype, "bf16") && !o.check && !o.bench.count);
    CHECK(parse(&o, "--bench 8,16") == GT_OK && o.bench.count == 2 && o.batch == 8);
    CHECK(o.bench.of[0] == 8 && o.bench.of[1] == 16);
    CHECK(parse(&o, "--csv=--stateful") == GT_OK && !strcmp(o.csv, "--stateful") && !o.stateful);
    CHECK(parse(&o, "--batch 3") == GT_OK && o.batch == 3); /* a value on the command line replaces the default */
    char *argv[] = {"hybrid_train", "--batch", "3", NULL};
    CHECK(hy_options_parse(&cuda, 3, argv) == GT_OK && hy_options_default(&cuda, 1) == GT_OK);
    CHECK(cuda.batch == 3 && cuda.seq == 128);
}

static void test_options_values(void) {
    hy_options o;
    CHECK(parse(&o, "--steps 7 --lr=2e-3 --model GF-RH --hidden 64 --layers=3 --seed 9007199254740991 "
                    "--device cpu --stateful --csv a.csv --prompt The --min_lr 1e-4") == GT_OK);
    CHECK(o.steps == 7 && o.lr == 2e-3 && o.hidden == 64 && o.layers == 3 && o.min_lr == 1e-4);
    CHECK(o.seed == 9007199254740991 && o.stateful == 1 && !strcmp(o.model, "GF-RH"));
    CHECK(!strcmp(o.device, "cpu") && !strcmp(o.csv, "a.csv") && !strcmp(o.prompt, "The"));
    CHECK(parse(&o, "--max-steps 9 --batch_size 5 --seq-len=17") == GT_OK);
    CHECK(o.steps == 9 && o.batch == 5 && o.seq == 17);
    static const struct {
        const char *name;
        long long steps, batch, seq;
    } configs[] = {
        {"quick", 200, 8, 64}, {"default", 5000, 8, 256}, {"8m-50k", 50000, 32, 64}, {"shakespeare", 1220, 32, 256}};
    for (size_t i = 0; i < sizeof configs / sizeof configs[0]; i++) {
        char line[1024];
        snprintf(line, sizeof line, "%s%s/%s.yaml --seed 3", i % 2 ? "--config " : "--config=", HY_CONFIGS,
                 configs[i].name);
        if (!CHECK(parse(&o, line) == GT_OK && o.steps == configs[i].steps && o.batch == configs[i].batch &&
                   o.seq == configs[i].seq && o.seed == 3))
            puts(hy_last_error());
    }
    CHECK(refused("--config", "--config: the value is missing", ""));
    CHECK(refused("--config --steps 3", "--config: the value is missing", ""));
    CHECK(parse(&o, "--log b.csv --stateful --stateful=no --gates-strict=on") == GT_OK);
    CHECK(!strcmp(o.csv, "b.csv") && !o.stateful && o.gates_strict);
    CHECK(parse(&o, "--separator \\n--\\x0c\\t\\\\n --steps 1e3") == GT_OK);
    CHECK(!strcmp(o.separator, "\n--\f\t\\n") && o.steps == 1000);
    CHECK(parse(&o, "-h") == GT_OK && o.help);
    CHECK(parse(&o, "--list-models") == GT_OK && o.list_models);
}

/* A mode must refuse an option that it does not read, and name it.  For every mode, the test starts from the fewest
 * options that select the mode. */
static void test_options_of_modes(void) {
    static const struct {
        const char *mode, *refused;
    } modes[] = {{"eval", "vocab end-token steps lr min-lr warmup weight-decay clip seed stateful recompute fuse "
                          "save-every eval-every eval-tokens log-every sample sample-every prompt temperature top-k "
                          "gates-strict bench-runs weights"},
                 {"generate", "data vocab end-token split steps lr min-lr warmup weight-decay clip stateful "
                              "recompute fuse eval-every eval-tokens log-every sample-every gates-strict bench-batch "
                              "bench-generate val held-out shuffle final-eval-tokens"},
                 {"check", "end-token steps lr warmup clip eval-every sample prompt gates-strict bench-steps weights"},
                 {"bench", "end-token steps seq min-lr warmup eval-tokens sample log-every gates-strict"},
                 {"list-models", "model hidden steps batch seq seed dtype synchronize sample bench-cpu"},
                 {"plan", "batch steps lr seed split synchronize sample bench-runs weights"},
                 {"profile", "steps lr clip eval-every sample top-k bench-runs weights"},
                 {"train", "bench-batch bench-runs bench-steps bench-cpu bench-generate"},
                 {"resume", "bench-batch bench-cpu weights"},
                 {"init", "bench-runs weights"}};
    for (size_t i = 0; i < sizeof modes / sizeof modes[0]; i++) {
        char words[512], *save;
        snprintf(words, sizeof words, "%s", modes[i].refused);
        for (char *name = strtok_r(words, " ", &save); name; name = strtok_r(NULL, " ", &save)) {
            static const char *const values[] = {"yes", "1", "1e-4", "tail", "wkv_ssm", "f32", "HY", "16", "int8"};
            hy_options o;
            char line[128], told[64];
            size_t k = 0;
            do snprintf(line, sizeof line, "--%s=%s", name, values[k]);
            while (parse(&o, line) != GT_OK && ++k < sizeof values / sizeof values[0]);
            snprintf(told, sizeof told, "%s: has no effect with", name);
            if (!CHECK(hy_options_fit(&o, modes[i].mode) == GT_ERROR_VALUE && strstr(hy_last_error(), told)))
                printf("  %s with %s: %s\n", line, modes[i].mode, hy_last_error());
        }
    }
    CHECK(says(2, "--generate none.st --steps 5", "steps: has no effect with --generate", ""));
    CHECK(says(2, "--bench 8 --bench-batch 2 --batch 3", "batch: has no effect with --bench-batch", ""));
    CHECK(
        says(2, "--bench 8 --bench-generate --bench-steps 2", "bench-steps: has no effect with --bench-generate", ""));
    CHECK(says(2, "--bench 8 --bench-generate --recompute", "recompute: has no effect with --bench-generate", ""));
    CHECK(says(2, "--bench 8 --lr 1", "lr: has no effect with --bench unless --bench-steps is given", ""));
    CHECK(says(2, "--bench 8 --weights int8", "weights: has no effect with --bench unless --bench-generate is given",
               ""));
    CHECK(
        says(2, "--bench 8 --bench-generate --weights int8 --batch 65", "batch: 65 samples at once are too many", ""));
    CHECK(says(2, "--bench 8 --bench-generate --weights int8 --bench-batch 1,99", "bench-batch: 99 samples at once are",
               "the nearest is 64"));
}

static void test_options_refused(void) {
    static const char *const lists[] = {
        "", "0", "x", "16,x", "16,", ",16", "16,,16", "-1", "1.5", "16,0x10", "1048577", "1e2", "99999999999999999999"};
    char longest[2 * HY_TEXT_MAX];
    CHECK(refused("--stpes 3", "'stpes'", "nearest is steps ("));
    CHECK(refused("--modle HY", "'modle'", "nearest is model ("));
    CHECK(refused("--Lr 3", "'Lr'", "nearest is lr ("));
    CHECK(refused("--eval_evry 3", "'eval_evry'", "nearest is eval-every ("));
    CHECK(refused("--wurst 3", "unknown option 'wurst' (--help-all", ""));
    CHECK(refused("--temp 3", "unknown option 'temp'; the nearest is temperature", ""));
    CHECK(refused("--eval- 3", "unknown option 'eval-'", "(--help-all"));
    CHECK(refused("--x 3", "unknown option 'x' (--help-all", ""));
    CHECK(refused("--model 5m", "'5m'", "nearest is 5M"));
    CHECK(refused("--model GF-HR", "'GF-HR'", "nearest is GF-RH"));
    CHECK(refused("--device gpu", "'gpu' is none of: auto cuda cpu", ""));
    CHECK(refused("--dtype fp16", "'fp16'", "nearest is f16"));
    CHECK(refused("--steps 0", "steps: '0'", "nearest is 1"));
    CHECK(refused("--steps -4", "steps: '-4'", "nearest is 1"));
    CHECK(refused("--steps 12x", "'12x'", "nearest is 12"));
    CHECK(refused("--batch 2.5", "whole number", "nearest is 3"));
    CHECK(refused("--lr fast", "lr: 'fast'", "10; the default is 0.004, on CUDA 0.002"));
    CHECK(refused("--lr nan", "lr: 'nan'", "the default is 0.004, on CUDA"));
    CHECK(refused("--lr inf", "lr: 'inf'", "nearest is 10"));
    CHECK(refused("--steps=", "steps: ''", "the default is 400, on CUDA 300"));
    CHECK(refused("--warmup many", "warmup: 'many'", "the default is steps / 20"));
    CHECK(refused("--lr 11", "lr: '11'", "nearest is 10"));
    CHECK(refused("--hidden 100", "hidden: '100'", "nearest is 96"));
    CHECK(refused("--stateful=maybe", "stateful: 'maybe' is none of: yes no true", ""));
    CHECK(refused("--steps", "steps", "value is missing"));
    CHECK(refused("--csv --stateful", "--csv: the value is missing; if it is '--stateful', write ",
                  "write --csv=--stateful"));
    CHECK(refused("--log --steps 3", "--log: the value is missing; if it is '--steps'", ""));
    CHECK(refused("-steps 3", "'-steps'", "two dashes"));
    CHECK(refused("--warmup 21 --steps 20", "warmup: 21 steps are longer", "which has 20; give at most 20"));
    CHECK(refused("--warmup 401", "which has 400 (the default)", "--steps"));
    CHECK(refused("--separator a\\qb", "separator: unknown escape '\\q'", "\\xNN"));
    CHECK(refused("--separator \\x00", "separator: unknown escape '\\x00'", "from 01"));
    CHECK(refused("--prompt \\xg1", "prompt: unknown escape '\\xg1'", "backslash"));
    CHECK(refused("--prompt a\\", "prompt: unknown escape '\\'", "backslash"));
    for (size_t i = 0; i < sizeof lists / sizeof lists[0]; i++) {
        char text[64], line[64];
        snprintf(text, sizeof text, "bench: '%s' is not a list", lists[i]);
        snprintf(line, sizeof line, "--bench=%s", lists[i]);
        CHECK(refused(line, text, "from 1 to 1048576"));
    }
    CHECK(refused("--min-lr 0.5 --lr 0.1", "min-lr: 0.5", "give at most lr = 0.1"));
    CHECK(refused("no-such-file", "no-such-file", "No such file"));
    snprintf(longest, sizeof longest, "--data %0*d", HY_TEXT_MAX, 0);
    CHECK(refused(longest, "data", "longer than"));
}

static void test_options_file(void) {
    char line[256];
    hy_options o;
    const char *good = write_string("good.yaml", "# a comment\n"
                                                 "steps: 11   # another\n"
                                                 "\n"
                                                 "  lr :  1e-3\r\n"
                                                 "eval_every: 5\n"
                                                 "stateful: yes\n"
                                                 "prompt: \"a # b\\n\"\n"
                                                 "model: 'GF'");
    snprintf(line, sizeof line, "%s", good);
    CHECK(parse(&o, line) == GT_OK);
    CHECK(o.steps == 11 && o.lr == 1e-3 && o.eval_every == 5 && o.stateful);
    CHECK(!strcmp(o.prompt, "a # b\n") && !strcmp(o.model, "GF"));
    /* the command line overrides the config file, whether an option stands before or after the file's name */
    snprintf(line, sizeof line, "--steps 12 %s --stateful=no", good);
    CHECK(parse(&o, line) == GT_OK && o.steps == 12 && !o.stateful && o.lr == 1e-3);
    snprintf(line, sizeof line, "%s %s", good, good);
    CHECK(refused(line, "only one config file", "good.yaml"));
    CHECK(refused(write_string("bad.yaml", "steps: 3\n\nbacth: 4\n"), "bad.yaml:3: ", "nearest is batch"));
    CHECK(refused(write_string("bad.yaml", "steps: many\n"), "bad.yaml:1: steps: 'many'", "the default is"));
    CHECK(refused(write_string("bad.yaml", "steps 3\n"), "bad.yaml:1: ", "key: value"));
    CHECK(refused(write_string("bad.yaml", "steps: 3\nseq: 4\nmax_steps: 5\n"), "bad.yaml:3: steps: ", "twice"));
    CHECK(refused(write_string("bad.yaml", "log: a\ncsv: b\n"), "bad.yaml:2: csv: ", "twice"));
    CHECK(refused(write_string("bad.yaml", "prompt: \"ab # c\n"), "bad.yaml:1: prompt: the quote \" is not", "closed"));
    CHECK(refused(write_string("bad.yaml", "prompt: 'a' b\n"), "bad.yaml:1: prompt: 'b' follows", "quote"));
    CHECK(parse(&o, write_string("ok.yaml", "prompt: it's # a note\n")) == GT_OK && !strcmp(o.prompt, "it's"));
    CHECK(refused(folder, folder, "config file"));
    CHECK(refused(write_file("bad.yaml", "steps: 3\nbat\0ch: 4\n", 20), "bad.yaml:2: ", "NUL byte"));
    CHECK(refused(write_file("bad.yaml", "steps: 3\n\0", 10), "bad.yaml:2: ", "NUL byte"));
    CHECK(refused(write_string("bad.yaml", "\xef\xbb\xbfsteps: 3\n"),
                  "bad.yaml:1: ", "begins with a byte-order mark; save it as UTF-8"));
    CHECK(refused(write_file("bad.yaml", "\xff\xfes\0t\0", 6), "bad.yaml:1: ", "UTF-16"));
    CHECK(refused(write_file("bad.yaml", "\xfe\xff\0s\0t", 6), "bad.yaml:1: ", "UTF-16"));
    CHECK(refused("/dev/zero", "/dev/zero:1: ", "NUL byte"));
    snprintf(line, sizeof line, "%0*d", 250, 0);
    FILE *file = fopen("bad.yaml", "w");
    for (int i = 0; CHECK(file != NULL) && i < 10; i++) fputs(line, file);
    if (file) fclose(file);
    CHECK(refused("bad.yaml", "bad.yaml:1: ", "longer than 2046 bytes"));
}

/* ---- data ----------------------------------------------------------------------------------- */

/* Makes a text of `size` bytes from the first `symbols` letters, with documents of varying length. */
static char *make_text(int64_t size, int symbols, uint64_t seed) {
    char *text = malloc((size_t)size + 1);
    if (!text) abort();
    for (int64_t i = 0; i < size; i++) text[i] = (char)('a' + hy_random(&seed) % (uint64_t)symbols);
    for (int64_t i = 40; i + 3 < size; i += 20 + (int64_t)(hy_random(&seed) % 90)) memcpy(text + i, "\n\n\n", 3);
    text[size] = 0;
    return text;
}

static void test_split(void) {
    for (int64_t size = 2; size < 300; size++) {
        hy_text x;
        char *text = make_text(size, 5, (uint64_t)size);
        text[0] = 'X';
        CHECK(hy_text_from_bytes(&x, text, size, "") == GT_OK);
        CHECK(x.size == size && x.size - x.train == (size + 9) / 10);
        CHECK(x.document[0] == 0 && x.document[x.documents] == size);
        hy_text_free(&x);
        free(text);
    }
}

static void test_vocabulary(void) {
    uint8_t bytes[1000];
    int32_t token[4];
    int count;
    hy_text x;
    for (int i = 0; i < 1000; i++) bytes[i] = (uint8_t)(i * 7);
    CHECK(hy_text_from_bytes(&x, bytes, 1000, "") == GT_OK && x.vocab == 256);
    for (int i = 0; i < 1000; i++) CHECK(x.byte_of[hy_token(&x, i)] == bytes[i]);
    for (int b = 0; b < 256; b++) CHECK(x.token_of[b] == b);
    hy_text_free(&x);
    CHECK(hy_text_from_bytes(&x, "banana", 6, "") == GT_OK && x.vocab == 3);
    CHECK(x.byte_of[0] == 'a' && x.byte_of[1] == 'b' && x.byte_of[2] == 'n');
    CHECK(hy_text_encode(&x, "nab", token, &count, 0) == GT_OK);
    CHECK(count == 3 && token[0] == 2 && token[1] == 0 && token[2] == 1);
    CHECK(hy_text_encode(&x, "nax", token, &count, 0) != GT_OK && strstr(hy_last_error(), "'x'"));
    CHECK(hy_text_encode(&x, "\n", token, &count, 0) != GT_OK && strstr(hy_last_error(), "0x0a"));
    hy_text_free(&x);
}

static void test_entropy(void) {
    char text[2000];
    hy_text x;
    for (int i = 0; i < 2000; i++) text[i] = "abcd"[i % 4];
    CHECK(hy_text_from_bytes(&x, text, 2000, "") == GT_OK);
    CHECK(fabs(x.entropy_train - log(4)) < 1e-12 && fabs(x.entropy_held_out - log(4)) < 1e-12);
    hy_text_free(&x);
    memset(text, 'a', 2000);
    /* 'b' is only in the held-out part.  The unigram estimate adds 1 to each count, so the probability of 'b' is
     * 1/1802. */
    memset(text + 1800, 'b', 200);
    CHECK(hy_text_from_bytes(&x, text, 2000, "") == GT_OK);
    CHECK(x.entropy_train == 0 && fabs(x.entropy_held_out - log(1802)) < 1e-12);
    hy_text_free(&x);
}

static int documents_are(const char *text, const char *separator, int count, const int64_t *start) {
    hy_text x;
    int same = hy_text_from_bytes(&x, text, (int64_t)strlen(text), separator) == GT_OK && x.documents == count;
    for (int i = 0; same && i <= count; i++) same = x.document[i] == start[i];
    hy_text_free(&x);
    return same;
}

static void test_documents(void) {
    CHECK(documents_are("one\n\n\ntwo\n\nstill two\n\n\n\n\nthree\n", "", 3, (int64_t[]){0, 6, 25, 31}));
    CHECK(documents_are("one\r\n\r\n\r\ntwo\f\nthree\n\n\n", "", 3, (int64_t[]){0, 9, 13, 22}));
    CHECK(documents_are("one\n\ntwo\n\n", "", 1, (int64_t[]){0, 10}));
    CHECK(documents_are("a--b----c", "--", 4, (int64_t[]){0, 3, 6, 8, 9}));
    CHECK(documents_are("\n\n\nx", "", 2, (int64_t[]){0, 3, 4}));
    CHECK(documents_are("a\r\r\r\rb", "", 1, (int64_t[]){0, 6}));
}

/* Checks that every held-out token is a target exactly once, after its own inputs, and that no other token is a
 * target. */
static void check_held_out(int64_t size, int64_t rows, int64_t length) {
    char *text = make_text(size, 20, 3);
    int32_t *times = calloc((size_t)size, sizeof *times);
    hy_text x;
    hy_batch batch;
    int64_t next = 0, place, windows = 0;
    CHECK(hy_text_from_bytes(&x, text, size, "") == GT_OK);
    CHECK(hy_batch_create(&batch, rows, length) == GT_OK);
    place = x.train;
    while (hy_batch_held_out(&batch, &x, &next)) {
        int64_t counted = 0;
        for (int64_t i = 0; i < rows * length; i++) {
            CHECK(batch.keep[i / length] == 0 && batch.input[i] >= 0 && batch.input[i] < x.vocab);
            if (batch.target[i] < 0) continue;
            CHECK(batch.target[i] == hy_token(&x, place) && batch.input[i] == hy_token(&x, place - 1));
            CHECK(i % length == (place - x.train) % length);
            times[place++]++;
            counted++;
        }
        CHECK(batch.targets == counted);
        windows = next;
    }
    CHECK(windows == (size - x.train + length - 1) / length);
    for (int64_t i = 0; i < size; i++) CHECK(times[i] == (i >= x.train));
    hy_batch_free(&batch);
    hy_text_free(&x);
    free(times);
    free(text);
}

static void test_held_out(void) {
    check_held_out(1000, 4, 32); /* 100 tokens: three whole windows and a short one */
    check_held_out(1000, 3, 25); /* exactly four windows, two batches */
    check_held_out(1000, 2, 100);
    check_held_out(1000, 2, 101); /* the held-out part is shorter than one window */
    check_held_out(1000, 1, 1);
    check_held_out(9987, 8, 7);
}

static void test_random_windows(void) {
    enum { SIZE = 60, LENGTH = 16, ROWS = 8 };
    char *text = make_text(SIZE, 26, 4);
    int seen[SIZE] = {0}, places = 0;
    uint64_t random = 5;
    hy_text x;
    hy_batch batch;
    for (int i = 0; i < SIZE; i++) text[i] = (char)(i + 40); /* the value of a token tells its place in the text */
    CHECK(hy_text_from_bytes(&x, text, SIZE, "") == GT_OK && x.train == 54);
    CHECK(hy_batch_create(&batch, ROWS, LENGTH) == GT_OK);
    for (int i = 0; i < 200; i++) {
        hy_batch_random(&batch, &x, &random);
        CHECK(batch.targets == ROWS * LENGTH);
        for (int64_t row = 0; row < ROWS; row++) {
            const int32_t *input = batch.input + row * LENGTH, *target = batch.target + row * LENGTH;
            CHECK(batch.keep[row] == 0);
            for (int64_t t = 0; t < LENGTH; t++)
                CHECK(input[t] == input[0] + t && target[t] == input[t] + 1 && target[t] < x.train);
            seen[input[0]] = 1;
        }
    }
    for (int i = 0; i < SIZE; i++) places += seen[i];
    CHECK(places == 54 - LENGTH); /* the draws have reached every place where a window fits */
    hy_batch_free(&batch);
    hy_text_free(&x);
    free(text);
}

static int is_start(const hy_text *x, int64_t token) {
    for (int64_t d = 0; d < x->documents; d++)
        if (x->document[d] == token) return 1;
    return 0;
}

/* Makes two passes over the tracks, the parts of the text that the rows of a batch read.  In each pass every training
 * token except the first must be a target once. */
static void check_tracks(int64_t size, int64_t rows, int64_t length) {
    char *text = make_text(size, 20, 6);
    hy_text x;
    hy_batch batch;
    hy_tracks tracks;
    CHECK(hy_text_from_bytes(&x, text, size, "") == GT_OK && x.documents > 5);
    CHECK(hy_batch_create(&batch, rows, length) == GT_OK);
    CHECK(hy_tracks_create(&tracks, &x, rows) == GT_OK);
    CHECK(tracks.first[0] == 1 && tracks.end[rows - 1] == x.train);
    int64_t *place = calloc((size_t)rows, sizeof *place);
    int *passes = calloc((size_t)rows, sizeof *passes);
    for (int64_t row = 0; row < rows; row++) place[row] = tracks.first[row];
    for (int done = 0; !done;) {
        hy_batch_tracks(&batch, &x, &tracks);
        done = 1;
        for (int64_t row = 0; row < rows; row++) {
            const int32_t *input = batch.input + row * length, *target = batch.target + row * length;
            int64_t first = tracks.first[row], end = tracks.end[row], n = 0;
            CHECK(batch.keep[row] == !(place[row] == first || is_start(&x, place[row])));
            for (; n < length && target[n] >= 0; n++, place[row]++) {
                CHECK(n == 0 || !is_start(&x, place[row]));
                CHECK(target[n] == hy_token(&x, place[row]) && input[n] == hy_token(&x, place[row] - 1));
            }
            for (int64_t t = n; t < length; t++) CHECK(target[t] == -1 && input[t] == 0);
            CHECK(n > 0 && place[row] <= end);
            /* a window may be shorter only at the end of a track, or if the next window starts a new document */
            CHECK(n == length || place[row] == end || is_start(&x, place[row]));
            if (place[row] == end) place[row] = first, passes[row]++;
            done &= passes[row] >= 2;
        }
    }
    free(place);
    free(passes);
    hy_tracks_free(&tracks);
    hy_batch_free(&batch);
    hy_text_free(&x);
    free(text);
}

static void test_tracks(void) {
    hy_text x;
    hy_tracks tracks;
    check_tracks(1000, 1, 16);
    check_tracks(1000, 3, 16);
    check_tracks(1003, 7, 64);
    check_tracks(2000, 4, 1);
    CHECK(hy_text_from_bytes(&x, "abcdefghij", 10, "") == GT_OK);
    CHECK(hy_tracks_create(&tracks, &x, 9) != GT_OK && strstr(hy_last_error(), "too many"));
    CHECK(strstr(hy_last_error(), "at most 8 fit") && hy_tracks_create(&tracks, &x, 8) == GT_OK);
    hy_tracks_free(&tracks);
    hy_text_free(&x);
}

/* Files of numbers with two or four bytes must give the same tokens, whatever width the program keeps in memory. */
static void test_numbers(void) {
    static const int64_t values[] = {5, 0, 300, 2, 65535, 2, 7, 1, 2, 4};
    enum { COUNT = sizeof values / sizeof values[0] };
    hy_text x;
    int32_t token[32];
    int count;
    for (int width = 2; width <= 4; width += 2) {
        uint8_t bytes[4 * COUNT + 1] = {0};
        for (int i = 0; i < COUNT; i++)
            for (int k = 0; k < width; k++) bytes[width * i + k] = (uint8_t)(values[i] >> 8 * k);
        hy_source source = {.width = width, .end_token = 2, .sum = 1};
        CHECK(hy_text_read(&x, bytes, width * COUNT, &source) == GT_OK);
        CHECK(x.is_numbers && x.vocab == 65536 && x.width == 2 && x.size == COUNT && x.train == 9);
        for (int i = 0; i < COUNT; i++) CHECK(hy_token(&x, i) == values[i]);
        CHECK(x.documents == 4 && x.document[1] == 4 && x.document[2] == 6 && x.document[3] == 9 &&
              x.document[4] == COUNT);
        CHECK(strlen(x.sum) == 64);
        CHECK(hy_text_encode(&x, " 5, 300 65535", token, &count, 0) == GT_OK && count == 3 && token[2] == 65535);
        CHECK(hy_text_encode(&x, "5 x", token, &count, 0) != GT_OK && strstr(hy_last_error(), "'x' is not a list"));
        CHECK(hy_text_encode(&x, "65536", token, &count, 0) != GT_OK && strstr(hy_last_error(), "vocabulary of 65536"));
        CHECK(hy_text_resize(&x, 65535) != GT_OK && strstr(hy_last_error(), "token 65535"));
        CHECK(hy_text_resize(&x, 70000) == GT_OK && x.vocab == 70000);
        hy_text_free(&x);
        source.vocab = 65537;
        CHECK(hy_text_read(&x, bytes, width * COUNT, &source) == GT_OK && x.vocab == 65537 && x.width == 4);
        for (int i = 0; i < COUNT; i++) CHECK(hy_token(&x, i) == values[i]);
        hy_text_free(&x);
        source.vocab = 301;
        CHECK(hy_text_read(&x, bytes, width * COUNT, &source) != GT_OK &&
              strstr(hy_last_error(), "the token at index 4 is 65535: must be below 301"));
        source = (hy_source){.width = width, .end_token = -1};
        CHECK(hy_text_read(&x, bytes, width * COUNT, &source) == GT_OK && x.documents == 1);
        hy_text_free(&x);
        CHECK(hy_text_read(&x, bytes, width * COUNT + 1, &source) != GT_OK &&
              strstr(hy_last_error(), "not a multiple of the"));
        CHECK(hy_text_read(&x, bytes, 0, &source) != GT_OK && strstr(hy_last_error(), "empty"));
        source.end_token = 65536;
        CHECK(hy_text_read(&x, bytes, width * COUNT, &source) != GT_OK && strstr(hy_last_error(), "end-token: 65536"));
    }
    const uint8_t huge[] = {0, 0, 16, 0, 1, 0, 0, 0};
    const hy_source source = {.width = 4, .end_token = -1};
    CHECK(hy_text_read(&x, huge, 8, &source) != GT_OK && strstr(hy_last_error(), "largest possible vocabulary"));
}

/* The symbol that ends a document must become one token.  Bytes that occur only in this symbol must not be in the
 * vocabulary. */
static void test_end_symbol(void) {
    static const char text[] = "ab<|>ba<|><|>b";
    const hy_source source = {.separator = "<|>", .end_symbol = 1, .end_token = -1};
    static const int32_t tokens[] = {0, 1, 2, 1, 0, 2, 2, 1};
    const uint8_t wider[] = {'a', 'b', 'c'};
    hy_text x;
    CHECK(hy_text_read(&x, text, (int64_t)strlen(text), &source) == GT_OK);
    CHECK(x.vocab == 3 && x.end_symbol == 2 && x.size == 8 && x.token_of['<'] == -1 && !strcmp(x.end_text, "<|>"));
    for (int i = 0; i < 8; i++) CHECK(hy_token(&x, i) == tokens[i]);
    CHECK(x.documents == 4 && x.document[1] == 3 && x.document[2] == 6 && x.document[3] == 7 && x.document[4] == 8);
    CHECK(hy_text_recode(&x, wider, 3) == GT_OK && x.vocab == 4 && x.end_symbol == 3);
    for (int i = 0; i < 8; i++) CHECK(hy_token(&x, i) == (tokens[i] == 2 ? 3 : tokens[i]));
    hy_text_free(&x);
    uint8_t all[512 + 3]; /* text with every byte value and the end symbol */
    for (int i = 0; i < 512; i++) all[i] = (uint8_t)(i < 256 ? i : 'x');
    memcpy(all + 512, "\n\n\n", 3);
    const hy_source lines = {.separator = "", .end_symbol = 1, .end_token = -1};
    all['\f'] = ' ';
    CHECK(hy_text_read(&x, all, sizeof all, &lines) == GT_OK && x.vocab == 256 && x.width == 1);
    CHECK(hy_token(&x, x.size - 1) == 255 && x.end_symbol == 255);
    hy_text_free(&x);
}

/* With --split tracks, the last tenth of each track is held out, and all other tokens are training tokens. */
static void test_tracks_split(void) {
    enum { ROWS = 4, SIZE = 1115394, LENGTH = 256 };
    const hy_source source = {.width = 4, .end_token = -1, .tracks = ROWS};
    uint8_t *bytes = malloc(4 * (size_t)SIZE), *seen = calloc(SIZE, 1);
    for (int64_t i = 0; i < SIZE; i++)
        for (int k = 0; k < 4; k++) bytes[4 * i + k] = (uint8_t)(i >> 8 * k);
    hy_text x;
    hy_batch batch;
    hy_tracks tracks;
    /* 1,115,394 tokens in 4 tracks of 278,848.  Each track has 250,963 tokens for training, which give 980 windows
     * of 256. 108 whole windows are held out. */
    hy_source limited = source;
    limited.vocab = HY_VOCAB_MAX;
    /* keeps values below 2^20, the largest vocabulary */
    for (int64_t i = HY_VOCAB_MAX; i < SIZE; i++) bytes[4 * i + 2] &= 0x0f;
    CHECK(hy_text_read(&x, bytes, 4 * (int64_t)SIZE, &limited) == GT_OK);
    CHECK(x.size == SIZE - 2 && x.pieces == ROWS && x.piece == 278848 && x.piece_train == 250963);
    CHECK(x.train == ROWS * x.piece_train && x.piece_train / LENGTH == 980 &&
          (x.piece - x.piece_train) / LENGTH == 108);
    CHECK(hy_batch_create(&batch, ROWS, LENGTH) == GT_OK && hy_tracks_create(&tracks, &x, ROWS) == GT_OK);
    for (int64_t row = 0; row < ROWS; row++)
        CHECK(tracks.first[row] == row * x.piece + 1 && tracks.end[row] == row * x.piece + x.piece_train);
    hy_tracks_free(&tracks);
    CHECK(hy_tracks_create(&tracks, &x, 3) != GT_OK &&
          strstr(hy_last_error(), "3 rows, but the text is cut into 4 tracks"));
    uint64_t random = 5;
    int64_t wrong = 0, next = 0, counted = 0, held = 0;
    for (int i = 0; i < 400; i++) {
        hy_batch_random(&batch, &x, &random);
        for (int64_t row = 0; row < ROWS; row++) { /* up to 2^20, the value of a token tells its place in the text */
            const int64_t first = batch.target[row * LENGTH], piece = first / x.piece;
            if (first + LENGTH > HY_VOCAB_MAX || first < 70000) continue;
            wrong += first % x.piece < 1 || first + LENGTH > piece * x.piece + x.piece_train;
            wrong += batch.input[row * LENGTH] != first - 1;
            counted++;
        }
    }
    CHECK(wrong == 0 && counted > 1000);
    while (hy_batch_held_out(&batch, &x, &next))
        for (int64_t i = 0; i < ROWS * LENGTH; i++) {
            if (batch.target[i] < 0) continue;
            held++;
            if (batch.target[i] >= 70000 && batch.target[i] < HY_VOCAB_MAX) {
                seen[batch.target[i]]++;
                wrong += batch.target[i] % x.piece < x.piece_train;
            }
        }
    CHECK(wrong == 0 && held == x.size - x.train);
    for (int64_t i = 70000; i < HY_VOCAB_MAX; i++)
        if (i % x.piece >= x.piece_train) wrong += seen[i] != 1;
    CHECK(wrong == 0);
    CHECK(hy_text_fits(&x, x.piece_train - 1) == GT_OK && hy_text_fits(&x, x.piece_train) != GT_OK);
    hy_batch_free(&batch);
    hy_text_free(&x);
    limited.tracks = SIZE;
    CHECK(hy_text_read(&x, bytes, 4 * (int64_t)SIZE, &limited) != GT_OK &&
          strstr(hy_last_error(), "tracks; give a smaller --batch"));
    free(bytes);
    free(seen);
}

/* Loads the files of a --data value and of a --val value. */
static gt_status load_named(hy_text *x, const char *data, const char *val, const hy_source *source,
                            const uint64_t *shuffle) {
    hy_paths paths = {NULL, 0}, other = {NULL, 0};
    gt_status status = *data ? hy_paths_expand(&paths, data, shuffle) : GT_OK;
    if (status == GT_OK && *val) status = hy_paths_expand(&other, val, NULL);
    if (status == GT_OK) status = hy_text_load(x, &paths, &other, source);
    hy_paths_free(&paths);
    hy_paths_free(&other);
    return status;
}

static gt_status load_one(hy_text *x, const char *path, const hy_source *source) {
    return load_named(x, path, "", source, NULL);
}

/* Whether the text consists of these bytes. */
static int text_is(const hy_text *x, const char *expected) {
    int same = x->size == (int64_t)strlen(expected);
    for (int64_t i = 0; same && i < x->size; i++) same = x->byte_of[hy_token(x, i)] == (uint8_t)expected[i];
    return same;
}

/* Loads several files, a folder, and another text as the held-out part, each in memory and as a mapped file. */
static void test_files(void) {
    CHECK(!system("mkdir -p shards/inner"));
    write_string("shards/b", "bcd");
    write_string("shards/a", "aab");
    write_string("shards/.hidden", "zzz");
    write_string("shards/empty", "");
    write_string("c,d", "ccd");
    write_string("val", "bdbd");
    for (int is_mapped = 0; is_mapped < 2; is_mapped++) {
        const hy_source source = {.separator = "", .end_token = -1, .sum = 1, .map_from = is_mapped};
        hy_text x, y;
        hy_batch batch;
        char sum[65];
        int64_t next = 0;
        CHECK(load_named(&x, "shards", "", &source, NULL) == GT_OK && text_is(&x, "aabbcd") &&
              (x.token == NULL) == is_mapped);
        CHECK(x.documents == 2 && x.document[1] == 3 && x.train == 5); /* the end of a file ends its document */
        memcpy(sum, x.sum, sizeof sum);
        hy_text_free(&x);
        CHECK(load_named(&x, "shards/b,shards/a", "", &source, NULL) == GT_OK && text_is(&x, "bcdaab"));
        CHECK(strcmp(sum, x.sum));
        hy_text_free(&x);
        /* here the comma belongs to the file's name */
        CHECK(load_named(&x, "c,d", "", &source, NULL) == GT_OK && text_is(&x, "ccd"));
        hy_text_free(&x);
        int orders = 0;
        for (uint64_t seed = 0; seed < 16; seed++) { /* the same seed must give the same order of the files */
            CHECK(load_named(&x, "shards", "", &source, &seed) == GT_OK);
            CHECK(load_named(&y, "shards", "", &source, &seed) == GT_OK);
            CHECK(text_is(&x, text_is(&y, "aabbcd") ? "aabbcd" : "bcdaab"));
            orders |= text_is(&x, "aabbcd") ? 1 : 2;
            hy_text_free(&x), hy_text_free(&y);
        }
        CHECK(orders == 3);
        /* the whole text of --val is held out; its first token is no target, because no token stands before it */
        CHECK(load_named(&x, "shards", "val", &source, NULL) == GT_OK && text_is(&x, "aabbcdbdbd") && x.train == 6);
        CHECK(hy_held_out_tokens(&x) == 3 && strcmp(sum, x.sum));
        CHECK(hy_batch_create(&batch, 2, 8) == GT_OK && hy_batch_held_out(&batch, &x, &next) && batch.targets == 3);
        for (int i = 0; i < 3; i++)
            CHECK(batch.input[i] == hy_token(&x, 6 + i) && batch.target[i] == hy_token(&x, 7 + i));
        CHECK(!hy_batch_held_out(&batch, &x, &next));
        hy_batch_free(&batch);
        hy_text_free(&x);
        CHECK(load_named(&x, "", "val", &source, NULL) == GT_OK && x.train == 0 && hy_held_out_tokens(&x) == 3);
        const uint8_t wider[] = {'a', 'b', 'd'};
        CHECK(hy_text_recode(&x, wider, 3) == GT_OK && text_is(&x, "bdbd") && hy_token(&x, 0) == 1);
        hy_text_free(&x);
        CHECK(load_named(&x, "shards", "shards/empty", &source, NULL) != GT_OK);
        CHECK(strstr(hy_last_error(), "val: the text is too short: it has 0 tokens"));
        CHECK(load_named(&x, "shards,", "", &source, NULL) != GT_OK && strstr(hy_last_error(), "an empty name"));
        CHECK(load_named(&x, "shards/inner", "", &source, NULL) != GT_OK &&
              strstr(hy_last_error(), "contains no files"));
        CHECK(load_named(&x, "shards/a,no", "", &source, NULL) != GT_OK && strstr(hy_last_error(), "no: No such file"));
        /* token files: the first file ends in the middle of a document */
        const uint16_t one[] = {5, 0, 2, 7}, two[] = {300, 2};
        const hy_source numbers = {.width = 2, .end_token = 2, .map_from = is_mapped};
        static const int expected[] = {5, 0, 2, 7, 300, 2};
        write_file("1.u16", one, sizeof one), write_file("2.u16", two, sizeof two);
        CHECK(load_named(&x, "1.u16,2.u16", "", &numbers, NULL) == GT_OK && x.size == 6 && x.vocab == 301);
        for (int i = 0; i < 6; i++) CHECK(hy_token(&x, i) == expected[i]);
        CHECK(x.documents == 3 && x.document[1] == 3 && x.document[2] == 4 && (x.token == NULL) == is_mapped);
        CHECK(hy_text_resize(&x, 400) == GT_OK && x.vocab == 400 && hy_text_resize(&x, 300) != GT_OK);
        hy_text_free(&x);
        CHECK(load_named(&x, "1.u16,shards/a", "", &numbers, NULL) != GT_OK &&
              strstr(hy_last_error(), "shards/a: 3 bytes are not a multiple of the 2 bytes of a token"));
    }
}

/* Checks the size of the held-out part for several shares. */
static void test_held_out_share(void) {
    for (int64_t size = 20; size < 200; size += 9) {
        static const int64_t shares[] = {0, 100000, 250000, 10000, 900000};
        char *text = make_text(size, 5, (uint64_t)size);
        for (int i = 0; i < 5; i++) {
            const int64_t share = shares[i] ? shares[i] : 100000;
            const hy_source source = {.separator = "", .end_token = -1, .held_out = shares[i]};
            hy_text x;
            CHECK(hy_text_read(&x, text, size, &source) == GT_OK);
            CHECK(x.size - x.train == (size * share + 999999) / 1000000 && hy_held_out_tokens(&x) == x.size - x.train);
            hy_text_free(&x);
        }
        free(text);
    }
}

/* A run on several files, or with another text held out, must give the same results after --resume.  --eval --val must
 * read all of a file. */
static void test_other_texts(void) {
    const char *run = "--device cpu --hidden 16 --layers 1 --batch 2 --seq 8 --steps 6 --sample 0 ";
    char line[512], *whole, *out;
    write_string("one.txt", "abc cab bca abc. "), write_string("two.txt", "cc ba ab. aa bb"),
        write_string("v.txt", "abcab ba");
    snprintf(line, sizeof line, "%s--data one.txt,two.txt --shuffle --val v.txt --save v.st --save-every 0", run);
    CHECK(run_program(&whole, "%s", line) == 0 && strstr(whole, "all of --val") && strstr(whole, "2 files; "));
    CHECK(run_program(&out, "--eval v.st") == 0 && final_loss(out) == final_loss(whole) && strstr(out, "unigram"));
    free(out);
    CHECK(run_program(&out, "--eval v.st --val v.txt") == 0 && final_loss(out) == final_loss(whole));
    CHECK(!strstr(out, "unigram") && strstr(out, "v.txt: 8 bytes; 7 of them are held out (all of --val)"));
    free(out);
    CHECK(says(0, "--eval v.st --data one.txt", "(the last tenth)", ""));
    CHECK(says(0, "--eval v.st --data one.txt --held-out 0.5", "(the last 50 %)", "all 9 tokens"));
    CHECK(says(0, "--resume v.st --steps 8", "resumed", "held-out loss"));
    CHECK(says(2, "--resume v.st --steps 8 --val one.txt", "not the text that", ""));
    CHECK(says(2, "--resume v.st --steps 8 --shuffle=no", "shuffle: no differs from yes, the value in v.st", ""));
    snprintf(line, sizeof line, "%s--data one.txt --shuffle", run);
    CHECK(says(2, line, "shuffle: has no effect on one.txt, which is one file", ""));
    snprintf(line, sizeof line, "%s--data one.txt --val two.txt --held-out 0.2", run);
    CHECK(says(2, line, "held-out: has no effect with --val", ""));
    snprintf(line, sizeof line, "%s--data one.txt --val two.txt --csv two.txt", run);
    CHECK(says(2, line, "csv: two.txt would overwrite the text of --val", ""));
    snprintf(line, sizeof line, "%s--data one.txt,two.txt --save two.txt", run);
    CHECK(says(2, line, "save: two.txt would overwrite the text of --data", ""));
    snprintf(line, sizeof line, "%s--data one.txt --table two.txt", run);
    CHECK(says(2, line, "table: has no effect without --tokens uint16 or uint32", ""));
    free(whole);
}

static void test_texts_refused(void) {
    const hy_source plain = {.separator = "", .end_token = -1};
    hy_text x;
    CHECK(hy_text_from_bytes(&x, "", 0, "") != GT_OK && strstr(hy_last_error(), "empty"));
    CHECK(hy_text_from_bytes(&x, "aaaa", 4, "") != GT_OK && strstr(hy_last_error(), "the same"));
    CHECK(load_one(&x, "no-such-text", &plain) != GT_OK && strstr(hy_last_error(), "no-such-text"));
    CHECK(load_one(&x, write_string("empty.txt", ""), &plain) != GT_OK && strstr(hy_last_error(), "empty"));
    CHECK(load_one(&x, write_file("two.bin", "\0\xff", 2), &plain) == GT_OK && x.vocab == 2);
    CHECK(hy_text_fits(&x, 1) != GT_OK && strstr(hy_last_error(), "too short: it has 2 bytes, "));
    hy_text_free(&x);
    CHECK(hy_text_from_bytes(&x, "abcdefghij", 10, "") == GT_OK);
    CHECK(hy_text_fits(&x, 8) == GT_OK);
    CHECK(hy_text_fits(&x, 9) != GT_OK && strstr(hy_last_error(), "at most 8"));
    hy_text_free(&x);
}

/* ---- gates ---------------------------------------------------------------------------------- */

/* Backends with one faulty operator: it fails, does nothing, or leaves one number out. */
static gt_status no_scan(hy_backend *b, const gt_selective_scan_args *a) {
    (void)b, (void)a;
    return GT_ERROR_UNSUPPORTED;
}
static gt_status idle_ssd(hy_backend *b, const gt_ssd_args *a) {
    (void)b, (void)a;
    return GT_OK;
}
static gt_status idle_conv_ssd(hy_backend *b, const gt_conv_ssd_args *a) {
    (void)b, (void)a;
    return GT_OK;
}
static gt_status idle_wkv_ssm(hy_backend *b, const gt_wkv_ssm_args *a) {
    (void)b, (void)a;
    return GT_OK;
}
static gt_status (*whole_wkv6)(hy_backend *, const gt_wkv6_args *);
static gt_status short_wkv6(hy_backend *b, const gt_wkv6_args *a) {
    gt_status status = whole_wkv6(b, a);
    a->du[5] = 0;
    return status;
}
static void spoil_scan(hy_backend *b) { b->selective_scan_forward = no_scan; }
static void spoil_ssd(hy_backend *b) { b->ssd_backward = idle_ssd; }
static void spoil_conv_ssd(hy_backend *b) { b->conv_ssd_backward = idle_conv_ssd; }
static void spoil_wkv_ssm(hy_backend *b) { b->wkv_ssm_backward = idle_wkv_ssm; }
static void spoil_wkv6(hy_backend *b) {
    whole_wkv6 = b->wkv6_backward;
    b->wkv6_backward = short_wkv6;
}
static const struct {
    void (*spoil)(hy_backend *);
    const char *says;
} wrong[] = {{spoil_scan, "(selective_scan"},
             {spoil_ssd, "(ssd dx)"},
             {spoil_conv_ssd, "(conv_ssd dxBC)"},
             {spoil_wkv_ssm, "(wkv_ssm wkv6.dr)"},
             {spoil_wkv6, "(wkv6 du)"}};

static void test_gates(void) {
    hy_probe good = {.loss = 4,
                     .entropy = 4,
                     .finite = 1,
                     .has = {1, 1},
                     .state_rms = {0.1, 0.1},
                     .state_tokens = 8,
                     .activation_variance = 0.1};
    hy_probe bad = good;
    hy_backend *backend;
    CHECK(hy_backend_cpu(&backend) == GT_OK);
    CHECK(hy_gate_operators(backend).verdict == HY_PASS);
    CHECK(strstr(hy_gate_operators(backend).value, "9 of 9 operators, error "));
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        hy_backend copy = *backend;
        wrong[i].spoil(&copy);
        hy_gate gate = hy_gate_operators(&copy);
        if (!CHECK(gate.verdict == HY_FAIL && strstr(gate.value, "8 of 9") && strstr(gate.value, wrong[i].says)))
            puts(gate.value);
    }
    backend->close(backend);

    CHECK(hy_gate_forward(&good, 64, 64).verdict == HY_PASS);
    CHECK(hy_gate_forward(&good, 63, 64).verdict == HY_FAIL);
    bad.finite = 0;
    CHECK(hy_gate_forward(&bad, 64, 64).verdict == HY_FAIL);
    bad = good, bad.loss = NAN;
    CHECK(hy_gate_forward(&bad, 64, 64).verdict == HY_FAIL);

    CHECK(hy_gate_entropy(4.1, 65).verdict == HY_PASS);
    CHECK(hy_gate_entropy(3.0, 65).verdict == HY_WARN);  /* 0.72 ln V */
    CHECK(hy_gate_entropy(1.9, 65).verdict == HY_FAIL);  /* 0.46 ln V */
    CHECK(hy_gate_entropy(5.5, 256).verdict == HY_PASS); /* ln 256 is over 5 */
    CHECK(hy_gate_entropy(1.38, 4).verdict == HY_PASS);  /* ln 4 is under 2 */
    CHECK(hy_gate_entropy(11.0, 65536).verdict == HY_PASS);
    CHECK(hy_gate_entropy(0.5, 4).verdict == HY_FAIL);
    /* the untrained model gives the same output for every input, which is a fault */
    CHECK(hy_gate_entropy(log(65), 65).verdict == HY_FAIL);
    CHECK(hy_gate_entropy(log(65) * (1 - 1e-5), 65).verdict == HY_PASS);
    CHECK(hy_gate_entropy(NAN, 65).verdict == HY_FAIL);

    CHECK(hy_gate_training(1000, 4, 2, 1.0).verdict == HY_PASS);
    CHECK(hy_gate_training(1000, 4, 2, 0.2).verdict == HY_WARN);
    CHECK(hy_gate_training(1000, 4, 2, 3.0).verdict == HY_WARN);
    CHECK(hy_gate_training(1000, 4, 2, 5.1).verdict == HY_FAIL);
    CHECK(hy_gate_training(1000, 4, 4.1, 1.0).verdict == HY_FAIL);
    CHECK(hy_gate_training(1000, 4, NAN, 1.0).verdict == HY_FAIL);
    CHECK(hy_gate_short_training(1, 4, 3.9, 4.9).verdict == HY_PASS);
    CHECK(hy_gate_short_training(1, 4, 4, 1).verdict == HY_FAIL);
    CHECK(hy_gate_short_training(20, 4, 3.9, 5.1).verdict == HY_FAIL);
    CHECK(hy_gate_short_training(3, 4, NAN, 1).verdict == HY_FAIL);
    CHECK(hy_gate_short_training(3, 4, 3, NAN).verdict == HY_FAIL);

    CHECK(hy_gate_states(&good).verdict == HY_PASS);
    bad = good, bad.state_cosine[1] = 0.995;
    CHECK(hy_gate_states(&bad).verdict == HY_WARN);
    bad = good, bad.state_cosine[0] = 1;
    CHECK(hy_gate_states(&bad).verdict == HY_FAIL);
    bad = good, bad.state_rms[1] = 0;
    CHECK(hy_gate_states(&bad).verdict == HY_FAIL);
    bad = good, bad.activation_variance = 1e-7;
    CHECK(hy_gate_states(&bad).verdict == HY_FAIL);
    bad = good, bad.state_cosine[0] = NAN;
    CHECK(hy_gate_states(&bad).verdict == HY_FAIL);
    bad = good, bad.state_tokens = 0;
    CHECK(hy_gate_states(&bad).verdict == HY_SKIP);
    /* the gate must not judge a branch that the model lacks, but it must judge the other branch */
    for (int k = 0; k < 2; k++) {
        bad = good, bad.has[k] = 0, bad.state_rms[k] = bad.state_cosine[k] = 0;
        CHECK(hy_gate_states(&bad).verdict == HY_PASS && hy_gate_balance(&bad, NAN).verdict == HY_SKIP);
        bad.state_rms[1 - k] = 0;
        CHECK(hy_gate_states(&bad).verdict == HY_FAIL);
    }

    const struct {
        double ratio;
        hy_verdict verdict;
    } balance[] = {{1, HY_PASS},     {0.3, HY_PASS},  {3, HY_PASS},   {0.29, HY_WARN},    {3.1, HY_WARN},
                   {0.099, HY_FAIL}, {10.1, HY_FAIL}, {NAN, HY_FAIL}, {INFINITY, HY_FAIL}};
    for (size_t i = 0; i < sizeof balance / sizeof balance[0]; i++)
        CHECK(hy_gate_balance(&good, balance[i].ratio).verdict == balance[i].verdict);
}

/* The gates must pass for every named model in its own size. */
static void test_gates_of_models(void) {
    enum { B = 1, T = 32 };
    int count;
    const hy_config *list = hy_model_list(&count);
    hy_backend *backend;
    CHECK(hy_backend_cpu(&backend) == GT_OK);
    /* a learning rate of 0: the step must not change the weights */
    const hy_optimizer still = {.beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f};
    int32_t tokens[B * T + 1];
    for (int i = 0; i <= B * T; i++) tokens[i] = (i * i / 3 + i) % 62;
    for (int i = 0; i < count; i++) {
        hy_model *m;
        hy_probe probe;
        hy_result result;
        if (!CHECK(hy_model_create(backend, list + i, 62, B, T, 1, &m) == GT_OK)) continue;
        CHECK(hy_model_probe(m, tokens, tokens + 1, &probe) == GT_OK);
        CHECK(hy_model_train(m, tokens, tokens + 1, NULL, &still) == GT_OK);
        CHECK(hy_model_result(m, &result) == GT_OK);
        const hy_gate gates[] = {hy_gate_entropy(probe.entropy, 62), hy_gate_states(&probe),
                                 hy_gate_balance(&probe, result.ratio)};
        const int is_single = !probe.has[0] || !probe.has[1];
        CHECK(isnan(result.ratio) == is_single);
        if (!is_single) CHECK(result.ratio == result.norm[HY_RWKV] / result.norm[HY_MAMBA]);
        const struct {
            const char *name;
            double gain[2];
        } gains[] = {{"GF-RH", {0.7, 0.3}}, {"GF-MH", {0.3, 0.7}}, {"8M", {0.3, 0.7}},  {"RF", {1, 1}},
                     {"RWKV-6", {1, 0}},    {"Mamba-2", {0, 1}},   {"Mamba-1", {0, 1}}, {NULL, {0.5, 0.5}}};
        size_t g = 0;
        while (gains[g].name && strcmp(gains[g].name, list[i].name)) g++;
        for (int k = 0; k < 2; k++) CHECK(fabs(probe.branch_gain[k] - gains[g].gain[k]) < 1e-5);
        CHECK(fabs(probe.branch_cosine) < 0.3);
        for (size_t k = 0; k < sizeof gates / sizeof gates[0]; k++)
            if (!CHECK(gates[k].verdict == (is_single && k == 2 ? HY_SKIP : HY_PASS)))
                printf("%s: %s %s\n", list[i].name, gates[k].name, gates[k].value);
        hy_model_destroy(m);
    }
    backend->close(backend);
}

/* ---- the program ---------------------------------------------------------------------------- */

static void test_learns_fables(void) {
    char *out;
    int status = run_program(&out, TINY "--steps 150 --lr 0.01 --sample 80 --prompt The");
    double gain = unigram(out) - final_loss(out);
    if (!CHECK(status == 0 && gain > 0.3)) puts(out);
    printf("  held-out loss %.4f, %.2f nats under the unigram entropy\n", final_loss(out), gain);
    CHECK(strstr(out, "fables.txt") && strstr(out, "parameters") && strstr(out, "memory"));
    CHECK(strstr(out, "sample") && strstr(out, "\nThe"));
    CHECK(strstr(out, "\n150/150 "));
    free(out);
}

static void test_learns_another_text(void) {
    for (int stateful = 0; stateful < 2; stateful++) {
        char *out;
        int status = run_program(&out, TINY_GREEK "--steps 120 --lr 0.01 --sample 0 %s", stateful ? "--stateful" : "");
        double gain = unigram(out) - final_loss(out);
        if (!CHECK(status == 0 && gain > 0.5)) puts(out);
        printf("  %s: held-out loss %.4f, %.2f nats under the unigram entropy\n", stateful ? "tracks" : "windows",
               final_loss(out), gain);
        free(out);
    }
}

/* The same seed must give the same numbers and the same sample with any number of threads.  Another seed must give
 * others. */
static void test_repeats(void) {
    static const char *const threads[] = {"1", "2", "3", "2"};
    for (int stateful = 0; stateful < 2; stateful++) {
        char *out[4], *numbers[4];
        for (int i = 0; i < 4; i++) {
            int rows;
            setenv("OMP_NUM_THREADS", threads[i], 1);
            CHECK(run_program(&out[i], TINY_GREEK "--steps 12 --sample 50 --csv run.csv --seed %d %s", i == 3 ? 6 : 5,
                              stateful ? "--stateful" : "") == 0);
            numbers[i] = numbers_of("run.csv", &rows);
            CHECK(rows == 13);
        }
        unsetenv("OMP_NUM_THREADS");
        CHECK(!strcmp(numbers[0], numbers[1]) && !strcmp(numbers[0], numbers[2]));
        CHECK(strcmp(numbers[0], numbers[3]));
        CHECK(!isnan(final_loss(out[0])) && final_loss(out[0]) == final_loss(out[1]));
        const char *sample[2] = {strstr(out[0], "\nsample\n"), strstr(out[1], "\nsample\n")};
        CHECK(sample[0] && sample[1] && !strncmp(sample[0], sample[1], 130));
        for (int i = 0; i < 4; i++) free(out[i]), free(numbers[i]);
    }
}

static void test_csv(void) {
    char *out, *again;
    CHECK(run_program(&out, TINY_GREEK "--steps 6 --eval-every 2 --eval-tokens 64 --sample 0 --log run.csv") == 0);
    char *text = read_string("run.csv"), *save, *line = strtok_r(text, "\n", &save);
    CHECK(line && !strcmp(line, "step,tokens,loss,held_out,grad_norm,rwkv_norm,mamba_norm,lr,"
                                "tokens_per_s,memory_mib,seconds,grad_ratio,branch_cosine,rwkv_rms,"
                                "mamba_rms,rwkv_gain,mamba_gain,final_loss,final_tokens"));
    for (int step = 1; step <= 6; step++) {
        double x[19] = {0};
        line = strtok_r(NULL, "\n", &save);
        if (!CHECK(line != NULL)) break;
        char *at = line;
        for (int i = 0; i < 19; i++) {
            x[i] = *at == ',' || !*at ? NAN : strtod(at, &at);
            CHECK(*at == (i < 18 ? ',' : 0));
            at += i < 18;
        }
        CHECK(x[0] == step && x[1] == step * 128 && x[2] > 0 && x[4] > 0 && x[5] > 0 && x[6] > 0);
        CHECK(isnan(x[3]) == (step % 2 == 1) && x[7] > 0 && x[8] > 0 && x[9] > 0 && x[10] > 0);
        CHECK(fabs(x[11] - x[5] / x[6]) < 1e-4 * x[11]);
        for (int i = 12; i < 17; i++) CHECK(isnan(x[i]) == (step % 2 == 1));
        if (step % 2 == 0) {
            CHECK(fabs(x[12]) < 1 && x[13] > 0 && x[14] > 0); /* gains of HY start at 0.5 */
            CHECK(fabs(x[15] - 0.5) < 0.05 && fabs(x[16] - 0.5) < 0.05);
        }
        CHECK(isnan(x[17]) == (step < 6) && isnan(x[18]) == (step < 6));
        if (step < 6) continue;
        /* the curve ends with the loss over the first 128 held-out tokens, in whole batches; the final loss is over
         * more tokens, so it is another number */
        CHECK(fabs(x[17] - final_loss(out)) < 1e-4 && x[18] > 128 && x[3] != x[17]);
        CHECK(says(0, TINY_GREEK "--steps 6 --eval-every 2 --eval-tokens 64 --final-eval-tokens 64 --sample 0",
                   "\nheld-out       the first 128 of ", " tokens: "));
        CHECK(run_program(&again, TINY_GREEK "--steps 6 --eval-every 2 --eval-tokens 64 --final-eval-tokens 64 "
                                             "--sample 0") == 0);
        CHECK(fabs(x[3] - final_loss(again)) < 1e-4);
        free(again);
    }
    CHECK(strtok_r(NULL, "\n", &save) == NULL);
    free(text);
    free(out);
}

static void test_models(void) {
    int count;
    const hy_config *list = hy_model_list(&count);
    char *out;
    CHECK(run_program(&out, "--list-models") == 0);
    for (int i = 0; i < count; i++) {
        char name[32];
        snprintf(name, sizeof name, "\n  %s ", list[i].name);
        if (!CHECK(strstr(out, name))) puts(name);
    }
    free(out);
    for (int i = 0; i < count; i++) {
        int status = run_program(&out,
                                 "--data greek.txt --device cpu --model %s --hidden 32 --layers 1 "
                                 "--batch 2 --seq 16 --steps 2 --sample 5",
                                 list[i].name);
        if (!CHECK(status == 0 && final_loss(out) < 10)) puts(out);
        CHECK(strstr(out, list[i].name));
        free(out);
    }
}

static void test_help(void) {
    static const char *const options[] = {
        "data",         "separator",   "model",     "hidden",       "layers", "steps",        "batch",    "seq",
        "lr",           "min-lr",      "warmup",    "weight-decay", "clip",   "seed",         "stateful", "device",
        "eval-every",   "eval-tokens", "log-every", "csv",          "sample", "sample-every", "prompt",   "temperature",
        "gates-strict", "list-models", "help",      "dtype",        "check",  "bench",        "save",     "save-every",
        "resume",       "init",        "eval",      "generate",     "top-k"};
    char *out;
    int lines = 0;
    CHECK(run_program(&out, "--help") == 0); /* --help must fit on one screen */
    for (const char *line = out; *line; line += strcspn(line, "\n") + 1, lines++) CHECK(strcspn(line, "\n") < 80);
    if (!CHECK(lines <= 23 && strstr(out, "\n  --help-all "))) printf("  %d lines\n", lines);
    free(out);
    CHECK(run_program(&out, "--help-all") == 0);
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
        char name[32];
        snprintf(name, sizeof name, "\n  --%s ", options[i]);
        if (!CHECK(strstr(out, name))) puts(name);
    }
    for (const char *line = out; *line; line += strcspn(line, "\n") + 1) CHECK(strcspn(line, "\n") <= 80);
    free(out);
}

/* The log must have the learning rates of the schedule.  A batch in parts must have the loss of the whole batch. */
static void test_schedules(void) {
    static const struct {
        const char *options;
        double lr[10];
    } cases[] = {
        {"--schedule constant", {.5, 1, 1, 1, 1, 1, 1, 1, 1, 1}},
        {"--schedule wsd --decay-steps 4 --min-lr 0.002", {.5, 1, 1, 1, 1, 1, .8, .6, .4, .2}},
        {"--schedule wsd", {.5, 1, 1, 1, 1, 1, 1, 1, .55, .1}},
        {"--schedule wsd --decay-steps 4 --min-lr 0.002 --micro-batch auto", {.5, 1, 1, 1, 1, 1, .8, .6, .4, .2}},
        {"--schedule wsd --decay-steps 4 --min-lr 0.002 --micro-batch 1", {.5, 1, 1, 1, 1, 1, .8, .6, .4, .2}}};
    double losses[5] = {0};
    for (int i = 0; i < 5; i++) {
        char *out;
        remove("lr.csv");
        CHECK(run_program(&out, TINY_GREEK "--layers 1 --steps 10 --warmup 2 --lr 0.01 --sample 0 --csv lr.csv %s",
                          cases[i].options) == 0);
        losses[i] = final_loss(out);
        CHECK((strstr(out, "1 windows are in memory at once") != NULL) == (i == 4));
        free(out);
        char *text = read_string("lr.csv"), *row = strchr(text, '\n');
        for (int step = 0; step < 10 && CHECK(row != NULL); step++, row = strchr(row + 1, '\n')) {
            char *field = row;
            for (int k = 0; k < 7; k++) field = strchr(field + 1, ',');
            if (!CHECK(fabs(atof(field + 1) - 0.01 * cases[i].lr[step]) < 1e-8)) printf("  %d: %s\n", step, field);
        }
        free(text);
    }
    /* with auto the whole batch fits into memory; in parts the loss differs by rounding */
    CHECK(losses[1] == losses[3] && fabs(losses[1] - losses[4]) < 2e-3);
}

static void test_quiet(void) {
    char *out;
    CHECK(run_program(&out, TINY_GREEK "--steps 3 --sample 0 --quiet") == 0);
    CHECK(!strstr(out, "PASS  G") && !strstr(out, "gates before") && !strstr(out, "\nbranches ") &&
          strstr(out, " PASS, "));
    free(out);
    /* with --quiet the report must still show a gate that fails */
    CHECK(run_program(&out, TINY_GREEK "--steps 6 --lr 10 --warmup 0 --clip 0 --sample 0 --quiet --gates-strict") > 0);
    CHECK(!strstr(out, "PASS  G") && (strstr(out, "FAIL  G") || strstr(out, "not finite")));
    free(out);
}

static void test_errors(void) {
    write_string("short.txt", "abcdefghij");
    write_string("empty.txt", "");
    char version[64];
    snprintf(version, sizeof version, "hybrid_train %d.%d.%d\n", GT_VERSION_MAJOR, GT_VERSION_MINOR, GT_VERSION_PATCH);
    CHECK(says(0, "--version", version, ""));
    CHECK(says(0, "--help-all", "--config CONFIG means the same", "--log for --csv, --max-steps for --steps"));
    CHECK(says(2, "--stpes 3", "hybrid_train: unknown option 'stpes'", "is steps"));
    CHECK(says(2, "--model XY", "'XY' is none of: HY GF ", ""));
    CHECK(says(2, "--data no-such-text", "no-such-text", "No such file"));
    CHECK(says(2, "--device cpu --dtype bf16", "dtype: 'bf16'", "leave --dtype out"));
    CHECK(says(1, TINY_GREEK "--check", "check: ", "no device to compare with the CPU"));
    CHECK(says(2, TINY_GREEK "--bench 8,x", "hybrid_train: bench: '8,x'", "such as 256,512"));
    CHECK(says(2, TINY_GREEK "--bench 0", "hybrid_train: bench: '0'", "such as 256,512"));
    CHECK(says(2, "--device cpu --data short.txt --bench 4,9", "hybrid_train: the text is too short", "at most 8"));
    CHECK(says(0, "--device cpu --model HY --hidden 32 --layers 2 --batch 4 --data short.txt --bench 1", ",inf,4,1,",
               ",step,4,1,"));
    CHECK(says(2, TINY "--data /dev/zero", "data file /dev/zero: not a regular file", "1024 MiB"));
    CHECK(says(1, TINY_GREEK "--batch 65536 --seq 8000", "MiB of memory, ",
               "; it needs less with a smaller --batch (65536), a smaller --seq (8000) or --recompute\n"));
    CHECK(says(1, TINY_GREEK "--batch 65536 --seq 8000 --recompute", "MiB of memory, ",
               "; it needs less with a smaller --batch (65536) or a smaller --seq (8000)\n"));
    CHECK(says(1, "--device cpu --hidden 32 --layers 2 --data greek.txt --batch 65536 --bench 8000", "MiB of memory, ",
               "with a smaller --batch (65536), shorter lengths than 8000 in --bench or --recompute\n"));
    CHECK(says(1, TINY_GREEK "--batch 65536 --seq 1 --hidden 8192 --layers 128", "MiB of memory, ",
               "; it needs less with a smaller --batch (65536) or --recompute\n"));
    CHECK(says(1, TINY_GREEK "--batch 1 --seq 1 --hidden 8192 --layers 128", "MiB of memory, ",
               "; it needs less with a smaller --model\n"));
    CHECK(says(2, TINY_GREEK "--prompt \\x01", "prompt: ", "does not occur"));
    CHECK(says(2, TINY "--data short.txt", "too short for one window", "at most 8"));
    CHECK(says(2, TINY "--data empty.txt", "empty.txt", "empty"));
    CHECK(says(2, TINY_GREEK "--csv /no/such/folder/a.csv", "/no/such/folder/a.csv", "No such file"));
}

/* Without CUDA, --device auto must say why it takes the CPU, and --device cuda must be an error.  With CUDA, both must
 * train. */
static void test_device(void) {
    const char *rest = "--data greek.txt --hidden 32 --layers 1 --batch 2 --seq 16 --steps 2";
    char line[256], why[256];
    hy_backend *cuda;
    int works = hy_backend_cuda(&cuda, GT_BF16, -1) == GT_OK;
    snprintf(why, sizeof why, "%s", hy_last_error());
    if (works) cuda->close(cuda);
    snprintf(line, sizeof line, "--device auto %s", rest);
    CHECK(says(0, line, works ? "device      " : "no CUDA (", "held-out loss "));
    snprintf(line, sizeof line, "--device cuda %s", rest);
    CHECK(works ? says(0, line, "device      ", "held-out loss ") : says(1, line, "device cuda: ", why));
    snprintf(line, sizeof line, "--device auto --dtype bf16 %s", rest);
    CHECK(works ? says(0, line, "device      ", "held-out loss ")
                : says(2, line, "dtype: 'bf16' needs a GPU", "to compute in f32 on the CPU"));
}

/* The program must run on a text of random bytes, and on a text with only two byte values, although there is nothing to
 * learn. */
static void test_binary_text(void) {
    static uint8_t bytes[4000];
    uint64_t seed = 8;
    char *out;
    for (int mask = 255; mask; mask = mask == 255 ? 1 : 0) {
        for (int i = 0; i < 4000; i++) bytes[i] = (uint8_t)(hy_random(&seed) & (unsigned)mask);
        write_file("binary.bin", bytes, sizeof bytes);
        int status = run_program(&out, TINY "--data binary.bin --steps 5 --sample 40");
        if (!CHECK(status == 0 && fabs(final_loss(out) - unigram(out)) < 1)) puts(out);
        for (const char *p = out; *p; p++) CHECK(*p == '\n' || (*p >= 32 && *p != 127) || *p & 0x80);
        free(out);
    }
}

/* In a longer run, gate G3 must judge only the first 1000 steps. */
static void test_gate_of_long_run(void) {
    CHECK(says(0,
               "--device cpu --data greek.txt --hidden 16 --layers 1 --batch 1 --seq 4 --steps "
               "1003 --sample 0",
               " in 1000 steps, gradient ", "held-out loss "));
}

/* Sets all weights of a model file to 0, and renames the key of its checksum, so that the program does not check it. */
static void zero_weights(const char *path) {
    FILE *file = fopen(path, "r+b");
    unsigned char length[8];
    uint64_t size = 0;
    if (!CHECK(file && fread(length, 1, 8, file) == 8)) return;
    for (int i = 8; i-- > 0;) size = size << 8 | length[i];
    char *header = calloc(1, size + 1), *key = NULL;
    if (!CHECK(header && fread(header, 1, size, file) == size && (key = strstr(header, "\"checksum\"")))) return;
    memcpy(key, "\"user.sum\"", 10);
    fseek(file, 0, SEEK_END);
    long end = ftell(file);
    fseek(file, 8, SEEK_SET);
    fwrite(header, 1, size, file);
    for (long at = 8 + (long)size; at < end; at++) fputc(0, file);
    free(header);
    CHECK(!fclose(file));
}

static void test_gates_strict(void) {
    /* steps at learning rate 10 ruin the weights, so the loss rises and G3 fails */
    const char *rest = TINY_GREEK "--steps 3 --lr 10 --warmup 0 --sample 0 --clip 0";
    char line[256];
    CHECK(says(0, rest, "FAIL  G3 ", "held-out loss "));
    snprintf(line, sizeof line, "%s --gates-strict", rest);
    CHECK(says(3, line, "FAIL  G3 ", "held-out loss "));
    char *out, *log;
    CHECK(run_program(&out, TINY_GREEK "--steps 1 --sample 0 --save dead.st") == 0);
    free(out);
    zero_weights("dead.st");
    CHECK(run_program(&out, "--data greek.txt --device cpu --init dead.st --batch 2 --seq 8 "
                            "--steps 3 --gates-strict --csv dead.csv") == 3);
    CHECK(strstr(out, "FAIL  G3.5") && strstr(out, "FAIL  G4 ") &&
          strstr(out, "ended by a gate, before the first update") && !strstr(out, " G2 ") && !strstr(out, " G3 ") &&
          !strstr(out, "held-out loss"));
    log = read_string("dead.csv");
    CHECK(strchr(log, '\n') && !strchr(log, '\n')[1]); /* the log has its header, but no step */
    free(log);
    free(out);
    CHECK(says(0, TINY_GREEK "--steps 1 --sample 0", "PASS  G3    first batch ", " in 1 step, "));
    CHECK(says(0, TINY_GREEK "--steps 20 --sample 0", "PASS  G3    first batch ", " in 20 steps, "));
    CHECK(says(0, TINY_GREEK "--steps 1 --sample 0 --model Mamba-1", "SKIP  G4 ", "branches    Mamba alone: RMS "));
    CHECK(says(0, TINY_GREEK "--steps 60 --sample 0 --gates-strict", "PASS  G1 ", "held-out loss "));
}

static void test_not_finite(void) {
    CHECK(says(1, TINY_GREEK "--steps 200 --lr 10 --warmup 0 --clip 0 --weight-decay 10 --sample 0",
               "hybrid_train: step ", "not finite"));
}

static void test_interrupt(void) {
    remove("run.csv");
    pid_t child = start_program(TINY_GREEK "--steps 1000000 --sample 20 --csv run.csv");
    CHECK(wait_for_lines("run.csv", 4));
    CHECK(kill(child, SIGINT) == 0);
    CHECK(wait_for(child) == 130);
    char *out = read_string("out.txt");
    if (!CHECK(strstr(out, "interrupted") && !isnan(final_loss(out)))) puts(out);
    CHECK(strstr(out, "G3.5") && strstr(out, "\nsteps  "));
    free(out);
}

/* A second Ctrl-C must end the program at once, before it computes the final loss. */
static void test_interrupt_twice(void) {
    int status = 0;
    remove("run.csv");
    pid_t child = start_program(TINY "--steps 1000000 --sample 1000000 --csv run.csv");
    CHECK(wait_for_lines("run.csv", 3));
    for (int i = 0; i < 3000 && waitpid(child, &status, WNOHANG) == 0; i++) {
        kill(child, SIGINT);
        nanosleep(&(struct timespec){0, 20000000}, NULL);
    }
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGINT);
}

/* ---- every option in every mode --------------------------------------------------------------- */

enum { MODES = 10, CHECKING = 5, REPORT_MAX = 1 << 14 };
#define SIZES_OF_MATRIX "--device cpu --data m.txt --hidden 16 --layers 2 "
static const struct {
    const char *name, *line;
} matrix_modes[MODES] = {{"train", SIZES_OF_MATRIX "--model HY --batch 2 --seq 8 --steps 2 --sample 8"},
                         {"init", "--device cpu --init m.st --data m.txt --batch 2 --seq 8 --steps 2 --sample 8"},
                         {"resume", "--resume m.st --steps 5"},
                         {"eval", "--eval m.st"},
                         {"generate", "--generate m.st"},
                         {"check", SIZES_OF_MATRIX "--model HY --batch 2 --seq 8 --check"},
                         {"bench", SIZES_OF_MATRIX "--model HY --bench 4 --bench-runs 1"},
                         {"list-models", "--list-models --data m.txt"},
                         {"plan", "--plan 2 --data m.txt --model HY --hidden 16 --layers 2 --seq 8"},
                         {"profile", SIZES_OF_MATRIX "--model HY --batch 2 --seq 8 --profile"}};

/* The effect of an option in each mode; `modes` has one letter for each mode, in the order of matrix_modes:
 *
 *     e   the report differs
 *     s   accepted; changes only speed, memory, a failure's report, or random numbers that no report shows
 *     =   must equal the model file's value: the error names the option and the file
 *     x   refused: the error names the option and the mode (training has no name)
 *     d   refused, because it needs another option, which the error names
 *     g   ends with status 3 if a gate fails
 *     p   prints and exits in any mode
 *     .   selects this mode, or another mode of training
 *
 * with: other options that this option needs.  If the mode refuses the option, the test leaves them out. */
static const struct {
    const char *option, *with, *value, *modes;
} matrix[] = {
    {"data", "", "n.txt", "ee=exeeeee"},
    {"separator", "", "=|", "ee=xxxxxxx"},
    {"end-symbol", "", "", "e====eeeee"},
    {"tokens", "--data n.u16", "uint16", "e====eeeee"},
    {"vocab", "--data n.u16 --tokens uint16", "900", "ed=xxeeeee"},
    {"end-token", "--data n.u16 --tokens uint16", "7", "ed=xxxxxxx"},
    {"shuffle", "--data m.txt,n.txt,n.txt,m.txt", "", "ee=exxxxxx"},
    {"val", "", "n.txt", "ee=exxxxxx"},
    {"held-out", "", "0.3", "ee=exxxxxx"},
    {"table", "--data n.u16 --tokens uint16", "n.table", "eddddxxxxx"},
    {"split", "", "tracks", "ee=exesxxs"},
    {"model", "", "GF", "e====eexee"},
    {"hidden", "", "32", "e====eexee"},
    {"layers", "", "3", "e====eexee"},
    {"heads", "", "2", "e====eexes"},
    {"head-size", "", "8", "eddddeexes"},
    {"d-state", "", "8", "e====eexee"},
    {"expand", "", "1", "e====eexee"},
    {"d-conv", "", "3", "e====eexee"},
    {"mamba-head", "", "16", "e====eexee"},
    {"ffn", "", "none", "e====eexee"},
    {"untied", "", "", "e====eexee"},
    {"steps", "", "7", "eeexxxxxxx"},
    {"batch", "", "3", "ee=seeexxe"},
    {"seq", "", "4", "ee=esexxee"},
    {"lr", "", "0.1", "ee=xxxxxxx"},
    {"micro-batch", "", "1", "eeexxxxxxx"},
    {"schedule", "--warmup 1 --min-lr 0.0004", "wsd", "ee=xxxxxxx"},
    {"decay-steps", "--schedule wsd", "2", "ee=xxxxxxx"},
    {"beta1", "", "0.5", "ee=xxxxxxx"},
    {"beta2", "", "0.5", "ee=xxxxxxx"},
    {"eps", "", "0.1", "ee=xxxxxxx"},
    {"dropout", "", "0.5", "ee=xxxxxxx"},
    {"ema", "", "0.5", "ee=xxxxxxx"},
    {"keep-best", "--save x.st --eval-every 1", "", "eeexxxxxxx"},
    {"min-lr", "", "0.001", "ee=xxxxxxx"},
    {"warmup", "", "1", "ee=xxxxxxx"},
    {"weight-decay", "", "10", "ee=xxxxxxx"},
    {"clip", "", "1e-8", "ee=xxxxxxx"},
    {"seed", "", "7", "ee=xeesxxs"},
    {"stateful", "", "", "ee=xxeexee"},
    {"recompute", "", "", "eeexxeexee"},
    {"fuse", "", "conv_ssd", "sssxxeexee"},
    {"save", "", "x.st", "eeexxxxxxx"},
    {"save-every", "--save x.st", "1", "eeexxxxxxx"},
    {"resume", "", "m.st", ".x.xxxxxxx"},
    {"init", "", "m.st", "..xxxxxxxx"},
    {"eval", "", "m.st", ".xx.xxxxxx"},
    {"score", "", "q.csv", "xxxexxxxxx"},
    {"generate", "", "m.st", ".xxx.xxxxx"},
    {"weights", "", "int8", "xxxxexxxxx"},
    {"device", "", "cpu", "sseesssxxs"},
    {"fallback", "--save x.st --device auto", "cpu", "sssxxxxxxx"},
    {"nccl", "", "off", "sssxxxxxsx"},
    {"dtype", "", "f32", "sssssssxes"},
    {"check", "", "", ".xxxx.xxxx"},
    {"bench", "", "4", ".xxxxx.xxx"},
    {"bench-batch", "", "3", "xxxxxxexxx"},
    {"bench-runs", "", "2", "xxxxxxexxx"},
    {"bench-steps", "", "1", "xxxxxxexxx"},
    {"bench-cpu", "", "", "xxxxxxexxx"},
    {"bench-generate", "", "", "xxxxxxexxx"},
    {"profile", "", "", ".xxxxxxxx."},
    {"synchronize", "", "", "sssssssxxs"},
    {"watch", "", "", "dddxxxxxxx"},
    {"plan", "", "1", ".xxxxxxx.x"},
    {"eval-every", "", "1", "eeexxxxxxx"},
    {"eval-tokens", "--eval-every 1", "8", "eeexxxxxxx"},
    {"final-eval-tokens", "", "8", "eeeexxxxxx"},
    {"log-every", "", "2", "eeexxxxxxx"},
    {"csv", "", "x.csv", "eeexxxxxxx"},
    {"sample", "", "6", "eeexexxxxx"},
    {"sample-every", "", "1", "eeexxxxxxx"},
    {"prompt", "", "T", "eeexexxxxx"},
    {"temperature", "", "5", "eeexexxxxx"},
    {"top-k", "", "1", "eeexexxxxx"},
    {"top-p", "", "0.05", "eeexexxxxx"},
    {"repetition-penalty", "", "50", "eeexexxxxx"},
    {"stop", "--sample 200", "e", "eeexexxxxx"},
    {"prompt-file", "", "p.txt", "xxxxexxxxx"},
    {"quiet", "", "", "eeexxxxxxx"},
    {"stall-timeout", "", "600", "sssxxxxxxx"},
    {"gates-strict", "", "", "gggxxxxxxx"},
    {"list-models", "", "", ".xxxxxx.xx"},
    {"version", "", "", "pppppppppp"},
    {"help", "", "", "pppppppppp"},
    {"help-all", "", "", "pppppppppp"},
};

/* Appends the columns of a CSV row that have a 1 in `wanted`. */
static void add_columns(char *kept, const char *row, const char *wanted) {
    for (; *wanted; wanted++) {
        const size_t length = strcspn(row, ",");
        if (*wanted == '1') strncat(kept, row, length), strcat(kept, ",");
        row += length + (row[length] == ',');
    }
}

/* Returns the output of a mode without times, speeds and the memory of the process.  The caller frees the result. */
static char *without_clock(char *out) {
    char *kept = calloc(2, strlen(out) + 2), *save;
    for (char *line = strtok_r(out, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        const size_t digits = strspn(line, " 0123456789");
        int commas = 0;
        for (const char *p = line; *p; p++) commas += *p == ',';
        if (!strncmp(line, "time ", 5) || (!strncmp(line, "memory  ", 8) && !strchr(line, ':'))) continue;
        if (strstr(line, ",cpu,f32,")) { /* a row of --bench: keeps sizes and losses */
            add_columns(kept, line, "1111111000000011011110");
        } else if (commas == 8 && !strchr("#p", *line)) { /* a row of --profile: keeps calls, nodes and bytes */
            add_columns(kept, line, "1111101");
        } else if (digits && line[digits] == '/') { /* a row of a step: keeps all fields up to the ratio of the norms */
            int fields = 0;
            for (char *field = strtok(line, " "); field && fields < 5; field = strtok(NULL, " "), fields++)
                strcat(kept, field), strcat(kept, " ");
        } else {
            strcat(kept, line);
        }
        strcat(kept, "\n");
    }
    return kept;
}

/* Runs a mode with further options and returns its report without the clock.  *status: its exit status.  *whole: the
 * whole output. */
static char *report_of(int mode, const char *with, const char *option, int *status, char **whole) {
    char *out;
    for (int i = 0; i < 4; i++) {
        static const char *const files[] = {"x.st", "x.st.1", "x.csv", "x.csv.1"};
        remove(files[i]);
    }
    *status = run_program(&out, "%s %s %s", matrix_modes[mode].line, with, option);
    if (whole) snprintf(*whole, REPORT_MAX, "%s", out);
    char *kept = without_clock(out);
    free(out);
    return kept;
}

/* Whether one option does in one mode what the table says. */
static int matrix_agrees(size_t row, int mode, char *const *bases) {
    char argument[128], whole[REPORT_MAX], named[80], *text = whole, *base = bases[mode];
    const char *option = matrix[row].option, *value = matrix[row].value, decision = matrix[row].modes[mode];
    const int is_refused = decision == 'x' || decision == 'd' || decision == '=';
    const char *with = is_refused ? "" : matrix[row].with;
    int status, base_status = 0;
    snprintf(argument, sizeof argument, "--%s%s%s", option, *value == '=' ? "" : *value ? "=" : "", value);
    if (*with) base = report_of(mode, with, "", &base_status, NULL);
    char *report = report_of(mode, with, argument, &status, &text);
    int agrees = 0;
    snprintf(named, sizeof named, "--%s", matrix_modes[mode].name);
    if (decision == 'p')
        agrees = status == 0 && !strncmp(whole, "hybrid_train", 12);
    else if (decision == 'g')
        agrees = status == (strstr(whole, "FAIL  G") ? 3 : 0);
    else if (is_refused)
        agrees = status == 2 && strstr(whole, option) &&
                 (decision == 'd' || mode == 0 || strstr(whole, decision == '=' ? "m.st" : named));
    else if (mode == CHECKING)
        agrees = status == 1 && strstr(whole, "check: there is no device to compare");
    else
        agrees = status == 0 && base_status == 0 && !strcmp(base, report) == (decision == 's');
    if (!agrees) printf("  %s %s %s: not '%c'; %d: %.300s\n", named, with, argument, decision, status, whole);
    if (*with) free(base);
    free(report);
    return agrees;
}

/* Every option that --help-all prints must have an effect in a mode, or the mode must refuse it by name.  A new option
 * fails this test until the table describes it for each mode. */
static void test_matrix(void) {
    char *text = make_text(3000, 26, 11), *bases[MODES], *help, *again;
    uint16_t numbers[3000];
    int status, count = 0;
    memcpy(text + 2000, "|\nThe", 5);
    write_string("m.txt", text);
    write_string("p.txt", "The");
    write_string("q.csv", "length,depth,first,prompt,answer\n1,0,5,8,2\n");
    for (int i = 0; i < 2000; i++) text[i] = text[i] > 'm' ? 'a' : text[i];
    text[2000] = 0;
    write_string("n.txt", text);
    for (int i = 0; i < 3000; i++) numbers[i] = (uint16_t)(i * i / 7 % 41);
    write_file("n.u16", numbers, sizeof numbers);
    FILE *table = fopen("n.table", "w");
    for (int i = 0; i < 1000 && CHECK(table != NULL); i++) fprintf(table, "<%d>\n", i);
    if (table) fclose(table);
    free(text);
    CHECK(says(0, SIZES_OF_MATRIX "--model HY --batch 2 --seq 8 --steps 2 --sample 8 --save m.st", "held-out", ""));
    for (int i = 0; i < MODES; i++) {
        bases[i] = report_of(i, "", "", &status, NULL), again = report_of(i, "", "", &status, NULL);
        if (!CHECK(status == (i == CHECKING) && !strcmp(bases[i], again))) printf("%s%s", bases[i], again);
        free(again);
    }
    CHECK(run_program(&help, "--help-all") == 0);
    for (const char *line = strstr(help, "\n  --"); line; line = strstr(line + 1, "\n  --")) {
        const char *name = line + 5;
        size_t row = 0, length = strcspn(name, " \n");
        const size_t rows = sizeof matrix / sizeof matrix[0];
        while (row < rows && (strlen(matrix[row].option) != length || strncmp(matrix[row].option, name, length))) row++;
        if (!CHECK(row < rows)) {
            printf("  --%.*s is not in the table of this test\n", (int)length, name);
            continue;
        }
        count++;
        for (int mode = 0; mode < MODES; mode++)
            if (matrix[row].modes[mode] != '.') CHECK(matrix_agrees(row, mode, bases));
    }
    CHECK(count == sizeof matrix / sizeof matrix[0]);
    free(help);
    for (int i = 0; i < MODES; i++) free(bases[i]);
}

/* The program must refuse options that have no effect because of other options, and options that name text or tokens
 * that the data lacks. */
static void test_without_effect(void) {
    uint16_t numbers[600];
    for (int i = 0; i < 600; i++) numbers[i] = (uint16_t)(i * i / 7 % 41);
    write_file("t.u16", numbers, sizeof numbers);
    CHECK(says(0, TINY_GREEK "--steps 1 --sample 0 --save p.st", "held-out loss ", ""));
    static const char *const refused[][3] = {
        {TINY_GREEK "--save-every 5", "save-every: has no effect without --save", ""},
        {"--resume p.st --save-every 5", "save-every: has no effect without --save", ""},
        {TINY_GREEK "--sample 0 --prompt x", "prompt: has no effect with --sample 0", ""},
        {TINY_GREEK "--sample 0 --top-p 0.5", "top-p: has no effect with --sample 0", ""},
        {TINY_GREEK "--sample 0 --stop x", "stop: has no effect with --sample 0", ""},
        {TINY_GREEK "--temperature 0 --top-p 0.5", "top-p: has no effect with --temperature 0", ""},
        {TINY_GREEK "--prompt-file x", "prompt-file: has no effect without --generate", ""},
        {"--generate p.st --prompt-file x --prompt y", "prompt: has no effect with --prompt-file", ""},
        {TINY_GREEK "--schedule constant --min-lr 0.001", "min-lr: has no effect with --schedule constant", ""},
        {TINY_GREEK "--decay-steps 3", "decay-steps: has no effect without --schedule wsd", ""},
        {TINY_GREEK "--schedule wsd --steps 10 --warmup 5 --decay-steps 6", "decay-steps: 6 steps do not fit after the",
         "give at most 5"},
        {TINY_GREEK "--schedule wsd --steps 10 --warmup 12 --decay-steps 6", "warmup: 12 steps are longer than the run",
         "give at most 10"},
        {TINY_GREEK "--schedule wsd --steps 10 --warmup 10 --decay-steps 6",
         "decay-steps: 6 steps do not fit after the warm-up, which takes all 10 steps", "give a smaller --warmup"},
        {TINY_GREEK "--ffn 17", "ffn: '17' is not a whole number from 0 to 16 or none", "the nearest is 16"},
        {TINY_GREEK "--ffn non", "ffn: 'non' is not a whole number from 0 to 16 or none", "the default is 0"},
        {TINY_GREEK "--micro-batch 3", "micro-batch: 3 does not divide batch = 4; the nearest is 2", ""},
        {TINY_GREEK "--micro-batch 2 --stateful", "micro-batch: 2 cannot be used with --stateful", ""},
        {TINY_GREEK "--micro-batch all", "micro-batch: 'all' is not a whole number", ""},
        {TINY_GREEK "--sample 0 --temperature 1", "temperature: has no effect with --sample 0", ""},
        {TINY_GREEK "--sample 0 --top-k 3", "top-k: has no effect with --sample 0", ""},
        {TINY_GREEK "--sample 0 --sample-every 3", "sample-every: has no effect with --sample 0", ""},
        {"--resume p.st --top-k 3", "top-k: has no effect with --sample 0", ""},
        {"--generate p.st --sample 0 --seed 3", "seed: has no effect with --sample 0", ""},
        {"--generate p.st --sample 5 --temperature 0 --top-k 3", "top-k: has no effect with --temperature 0", ""},
        {TINY_GREEK "--eval-every 0 --eval-tokens 9", "eval-tokens: has no effect with --eval-every 0", ""},
        {TINY_GREEK "--separator @@\\n", "separator: '@@\\n' does not occur in greek.txt", ""},
        {"--eval p.st --separator x", "separator: has no effect with --eval unless --end-symbol is given", ""},
        {"--profile --separator x",
         "separator: has no effect with --profile unless --end-symbol or --stateful is given", ""},
        {"--profile --stateful --separator @@", "separator: '@@' does not occur in ", "fables.txt"},
        {TINY "--data t.u16 --tokens uint16 --vocab 99 --end-token 98", "end-token: 98 does not occur in t.u16", ""},
        {"--profile --data t.u16 --tokens uint16 --end-token 1", "end-token: has no effect with --profile unless", ""},
        {"--plan 2 --device cpu", "device: cpu has no effect with --plan", ""},
        {TINY_GREEK "--model Mamba-2 --heads 2", "heads: 2 has no effect on --model Mamba-2", "no RWKV branch"},
        {TINY_GREEK "--model Mamba-1 --head-size 8", "head-size: 8 has no effect on --model Mamba-1", "no RWKV"},
        {TINY_GREEK "--model RWKV-6 --d-state 8", "d-state: 8 has no effect on --model RWKV-6", "no Mamba branch"},
        {TINY_GREEK "--model RWKV-6 --expand 1", "expand: 1 has no effect on", ""},
        {TINY_GREEK "--model RWKV-6 --d-conv 3", "d-conv: 3 has no effect on", ""},
        {TINY_GREEK "--model HY-M1 --mamba-head 8", "mamba-head: 8 has no effect on --model HY-M1", "no Mamba-2"},
        {TINY_GREEK "--model Mamba-2 --fuse conv_ssd", "fuse: conv_ssd has no effect on --model Mamba-2",
         "beside RWKV"},
        {TINY_GREEK "--model RWKV-6 --fuse conv_ssd", "fuse: conv_ssd has no effect on --model RWKV-6", ""},
    };
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++)
        CHECK(says(2, refused[i][0], refused[i][1], refused[i][2]));
    /* accepted: settings in a model file that have no effect here, and sizes of 0, which mean the default */
    static const char *const fine[] = {
        "--eval p.st", "--generate p.st", TINY_GREEK "--model Mamba-2 --heads 0 --steps 1 --sample 0 --separator=",
        "--profile --hidden 16 --layers 1 --batch 2 --seq 8 --data t.u16 --tokens uint16 "
        "--stateful --end-token 1 --device cpu"};
    for (size_t i = 0; i < sizeof fine / sizeof fine[0]; i++) CHECK(says(0, fine[i], "", ""));
}

/* Checks that the program finds the memory limit of a control group.  The test builds folders that look like those in a
 * container. */
static void test_memory_limit(void) {
    static const struct {
        const char *groups, *file, *text;
        unsigned long long limit; /* the expected limit, from this file and the files of the cases before */
    } cases[] = {
        {"0::/\n", "none", "", 0},
        {"0::/\n", "sys/fs/cgroup/memory.max", "max\n", 0},
        {"0::/\n", "sys/fs/cgroup/memory.max", "3000000000\n", 3000000000},
        /* folder a/b has no file, so the limit of a holds */
        {"0::/a/b\n", "sys/fs/cgroup/a/memory.max", "2000\n", 2000},
        {"0::/a/b\n", "sys/fs/cgroup/a/b/memory.max", "max\n", 2000},
        {"0::/a/b\n", "sys/fs/cgroup/a/b/memory.max", "1000\n", 1000},
        {"0::/a/b\n", "sys/fs/cgroup/a/memory.max", "700\n", 700},
        /* the group lies outside of the container, so the limit of the root holds */
        {"0::/a/../../c\n", "none", "", 3000000000},
        {"12:cpu,cpuacct:/x\n4:memory:/x/y\n0::/z\n", "sys/fs/cgroup/memory/memory.limit_in_bytes",
         /* this number means no limit in version 1; in version 2, group z has the limit of the root */
         "9223372036854771712\n", 3000000000},
        {"12:cpu,cpuacct:/x\n4:hugetlb,memory:/x/y\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes", "5000\n", 5000},
        {"12:cpu:/x\n5:memoryless:/x\n", "none", "", 0},
        {"damaged", "none", "", 0},
    };
    CHECK(system("mkdir -p tree/proc/self tree/sys/fs/cgroup/a/b tree/sys/fs/cgroup/memory/x") == 0);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char path[128];
        snprintf(path, sizeof path, "tree/%s", cases[i].file);
        write_string("tree/proc/self/cgroup", cases[i].groups);
        write_string(path, cases[i].text);
        if (!CHECK(hy_memory_limit("tree") == cases[i].limit))
            printf("  case %d: %zu\n", (int)i, hy_memory_limit("tree"));
    }
    CHECK(hy_memory_limit("nowhere") == 0);
}

/* ---- --bench, and what needs a device ---------------------------------------------------------
 */

enum { BENCH_COLUMNS = 18 }; /* columns after the first four */

/* Reads the columns of a row of --bench.  An empty column is NAN.  Returns 0 if the line is no such row. */
static int bench_row(char *line, char **pass, double *x) {
    char *at = line;
    for (int i = 0; i < 4; i++) {
        char *comma = strchr(at, ',');
        if (!comma || *line == '#' || !strncmp(line, "model,", 6)) return 0;
        *comma = 0;
        *pass = at;
        at = comma + 1;
    }
    for (int i = 0; i < BENCH_COLUMNS; i++) {
        char *end = at;
        x[i] = strtod(at, &end);
        if (end == at) x[i] = NAN;
        if (*end != (i + 1 < BENCH_COLUMNS ? ',' : 0)) return 0;
        at = end + 1;
    }
    return 1;
}

/* Checks a row of --bench, which is row number `kind` of its size.  inference: MiB in the first row of the size.
 * Training needs 12 more bytes for every parameter: its gradient and two moments.  The test checks no ratios of memory:
 * on a GPU, both sides include the workspace of matrix products, which is far larger than this small model. */
static int is_bench_row(const char *pass, const double *x, int size, int kind, double inference, double tolerance) {
    static const char *const passes[] = {"inf", "fwd", "fwd+bwd", "step", "train"};
    const double tokens = x[0] * x[1];
    int ok = CHECK(!strcmp(pass, passes[kind]) && x[0] == 1 + size % 2 && x[1] == 8 * (1 + size / 2));
    for (int i = 2; i < 8; i++) ok &= CHECK(x[i] > 0);
    ok &= CHECK(fabs(x[4] * x[2] / x[3] - 1) < 0.01 && fabs(x[3] * x[5] / 1e3 / tokens - 1) < 0.01);
    ok &= CHECK(fabs(x[6] * 1024 / tokens / x[7] - 1) < 0.05);
    ok &= CHECK(fabs(x[8] / (1e3 * x[4]) - 1) < 0.01 && x[9] >= 0 && fabs(x[10] * 1024 / tokens / x[11] - 1) < 0.2);
    ok &= CHECK(kind == 0 || x[10] > inference + 12 * x[2] / 1048576);
    ok &= CHECK(isnan(x[12]) == (kind != 0) && isnan(x[13]) == (kind != 0));
    ok &= CHECK(kind != 0 || (x[12] > 0 && x[13] <= tolerance));
    for (int i = 14; i < 17; i++) ok &= CHECK(isnan(x[i]) == (kind != 4));
    ok &= CHECK(isnan(x[17]));
    return ok & CHECK(kind != 4 || (x[14] > x[15] && x[15] > 0 && x[16] > 0)); /* the loss falls, so the model learns */
}

/* Checks that --bench prints five rows for each length and batch, and that the numbers of a row agree with each
 * other. */
static void check_bench(const char *device, const char *lengths, int sizes, double tolerance) {
    char *out, *save;
    int rows = 0;
    double inference = 0;
    CHECK(run_program(&out,
                      "%s --data greek.txt --model HY --hidden 32 --layers 2 --bench %s --bench-batch 1,2 "
                      "--bench-steps 20 --bench-cpu --lr 0.01",
                      device, lengths) == 0);
    for (char *line = strtok_r(out, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char *pass, whole[1024];
        double x[BENCH_COLUMNS];
        snprintf(whole, sizeof whole, "%s", line);
        if (!bench_row(line, &pass, x)) {
            if (*whole != '#' && strncmp(whole, "model,", 6)) printf("  no row: %s\n", whole);
            continue;
        }
        const int size = rows / 5, kind = rows % 5;
        rows++;
        if (!is_bench_row(pass, x, size, kind, inference, tolerance)) printf("  %s: %s\n", device, whole);
        if (kind == 0) inference = x[10];
    }
    CHECK(rows == 5 * sizes);
    free(out);
}

static void test_bench(void) { check_bench("--device cpu", "8,16", 4, 0); }

/* Checks that --bench --bench-generate prints one row for each length and batch.  Times are per token of all samples.
 * The byte floor must not depend on the length; for more samples it grows only by their states. */
static void check_bench_generate(const char *device, const char *weights, const char *name) {
    char *out, *save;
    int rows = 0;
    double floors[4] = {0};
    CHECK(run_program(&out,
                      "%s --data greek.txt --model HY --hidden 32 --layers 2 --bench 8,16 --bench-batch 1,3 "
                      "--bench-generate --bench-runs 2 %s",
                      device, weights) == 0);
    CHECK(strstr(out, "; copies ") && strstr(out, "GB/s, read and written; mean of 2 runs"));
    for (char *line = strtok_r(out, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char *pass, whole[1024];
        double x[BENCH_COLUMNS];
        snprintf(whole, sizeof whole, "%s", line);
        if (!bench_row(line, &pass, x)) continue;
        int ok = CHECK(rows < 4 && !strcmp(pass, name) && x[0] == 1 + rows % 2 * 2 && x[1] == 8 + rows / 2 * 8);
        ok &= CHECK(fabs(x[3] * x[5] / 1e3 / x[0] - 1) < 0.01 && x[9] >= 0 && x[10] > 0);
        for (int i = 12; i < 17; i++) ok &= CHECK(isnan(x[i]));
        ok &= CHECK(x[17] > 0 && x[17] < x[5]);
        if (!ok) printf("  %s: %s\n", device, whole);
        if (rows < 4) floors[rows++] = x[17];
    }
    CHECK(rows == 4 && floors[0] == floors[2] && floors[1] == floors[3]);
    CHECK(floors[1] > floors[0] && floors[1] < 3 * floors[0]);
    free(out);
}

static void test_bench_generate(void) {
    check_bench_generate("--device cpu", "", "generate");
    check_bench_generate("--device cpu", "--weights int8", "generate-int8");
}

/* Checks --profile.  The rows must list parts and operators with the right numbers of calls, and bytes as counted by
 * hand.  The rows of a part must add up to the part.  element: bytes of an activation. */
static void check_profile(const char *options, int element, int recompute, int conv_ssd) {
    enum { LAYERS = 3, M = 2 * 16, C = 32, F = 4 * C };
    char *out, *save;
    double part = 0, parts = 0, rows = 0, all[3] = {0}, step = 0;
    int calls = 0, found = 0, count = 0;
    CHECK(run_program(&out, "%s --data greek.txt --model HY --hidden 32 --layers 3 --batch 2 --seq 16 --profile %s %s",
                      options, recompute ? "--recompute" : "", conv_ssd ? "--fuse conv_ssd" : "") == 0);
    for (char *line = strtok_r(out, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char name[32], operator[32], pass[32], nodes[32] = "";
        double x[5]; /* calls, ms, MiB, share, GB/s */
        if (*line == '#' || !strncmp(line, "part,", 5)) continue;
        if (!CHECK(sscanf(line, "%31[^,],%31[^,],%31[^,],%lf,%31[0-9]", name, operator, pass, x, nodes) >= 4)) break;
        if (!CHECK(sscanf(strchr(line + strlen(name) + strlen(operator) + strlen(pass) + 3, ',') + 1 + strlen(nodes),
                          ",%lf,%lf,%lf,%lf", x + 1, x + 2, x + 3, x + 4) == 4)) {
            puts(line);
            break;
        }
        CHECK(x[0] > 0 && x[1] > 0 && x[2] >= 0 && x[3] >= 0);
        if (!strcmp(name, "step")) {
            step = x[1];
            CHECK(x[0] == all[0] && x[2] == all[2]);
        } else if (!strcmp(name, "all")) {
            memcpy(all, x, sizeof all);
            CHECK(fabs(x[3] - 100) < 1e-9);
        } else if (!strcmp(operator, "all")) {
            /* the row of a whole part: before it, checks the part above, whose rows are rounded to 0.001 MiB */
            CHECK(fabs(part - parts) < 0.0005 * (count + 1) + 1e-9);
            part = x[2], parts = 0, count = 0;
        } else {
            parts += x[2], rows += x[1], calls += (int)x[0], count++;
        }
        const double mib = 1048576;
        if (!strcmp(name, "ffn") && !strcmp(operator, "map") && !strcmp(pass, "forward"))
            found += CHECK(x[0] == LAYERS && fabs(x[2] - LAYERS * 2.0 * M * F * element / mib) < 1e-3);
        if (!strcmp(name, conv_ssd ? "rwkv" : "branches") && !strcmp(operator, conv_ssd ? "wkv6" : "wkv_ssm"))
            found += CHECK(x[0] == LAYERS - !strcmp(pass, "recompute"));
        if (!strcmp(name, "mamba") && !strcmp(operator, conv_ssd ? "conv_ssd" : "conv1d") && !strcmp(pass, "backward"))
            found += CHECK(x[0] == LAYERS);
        if (!strcmp(operator, "adamw")) found += CHECK(x[0] == 1 && x[2] > 0.9 * 28 * 100000 / mib);
        if (!strcmp(pass, "recompute") && !strcmp(name, "ffn")) found += CHECK(strcmp(operator, "gemm") != 0);
    }
    CHECK(found == (recompute ? 8 : 5) && calls == (int)all[0] && step > 0 && fabs(rows - all[1]) < 0.02 * all[1]);
    free(out);
}

static void test_profile(void) {
    check_profile("--device cpu", 4, 0, 0);
    check_profile("--device cpu", 4, 0, 1);
    check_profile("--device cpu --stateful", 4, 1, 0);
    CHECK(says(2, "--profile --save x.st", "--profile does not train; leave --save out", ""));
}

/* Whole runs with a model file: on files of tokens, with an end symbol, and with the text split into tracks. */
static void test_kinds_of_text(void) {
    char *out;
    uint8_t bytes[4 * 3000];
    for (int i = 0; i < 3000; i++) {
        const uint32_t token = (uint32_t)(i * i / 7 % 11 + (i % 3 ? 1000 : 0));
        for (int k = 0; k < 4; k++) bytes[4 * i + k] = (uint8_t)(token >> 8 * k);
    }
    write_file("tokens.u32", bytes, sizeof bytes);
    const char *options = "--device cpu --hidden 16 --layers 1 --batch 2 --seq 8 ";
    if (!CHECK(run_program(&out,
                           "%s --data tokens.u32 --tokens uint32 --vocab 1500 --end-token 1003 --stateful --steps 20 "
                           "--lr 0.01 --sample 5 --prompt 3,1004 --top-k 3 --save t.st",
                           options) == 0))
        puts(out);
    CHECK(strstr(out, "3,000 tokens, vocabulary 1500, ") && strstr(out, "bits per token, perplexity"));
    CHECK(strstr(out, "\n3 1004 ") && final_loss(out) < log(1500));
    free(out);
    if (!CHECK(run_program(&out, "--resume t.st --steps 24 --sample 0") == 0)) puts(out);
    free(out);
    if (!CHECK(run_program(&out, "--eval t.st") == 0 && strstr(out, "300 of them are held out (the last"))) puts(out);
    free(out);
    if (!CHECK(run_program(&out, "--generate t.st --prompt= --sample 3") == 0)) puts(out);
    free(out);
    CHECK(says(2, "--eval t.st --tokens bytes", "tokens: bytes differs from uint32, the value in t.st", ""));
    CHECK(says(2, "--generate t.st --prompt abc", "prompt: 'abc' is not a list of tokens", ""));
    CHECK(says(2, "--tokens uint16", "the fables are bytes; use --data to name a file", ""));
    CHECK(says(2, "--data tokens.u32 --vocab 7", "vocab: has no effect without --tokens uint16 or uint32", ""));
    CHECK(says(2, "--data tokens.u32 --end-token 7", "end-token: has no effect without --tokens", ""));
    CHECK(says(2, "--data tokens.u32 --tokens uint16 --end-symbol", "end-symbol: has no effect without --tokens bytes",
               ""));
    CHECK(says(2, "--data tokens.u32 --tokens uint16 --separator x", "separator: has no effect without --tokens bytes",
               ""));
    CHECK(says(2, "--data tokens.u32 --tokens uint32 --vocab 1010", "the token at index 29 is 1010: must be below 1010",
               ""));

    if (!CHECK(run_program(&out,
                           "%s --data greek.txt --end-symbol --split tracks --steps 20 --lr 0.01 --separator=\\n "
                           "--sample 5 --save e.st",
                           options) == 0))
        puts(out);
    CHECK(strstr(out, "(the last tenth of 2 tracks)") && strstr(out, "bits per token"));
    free(out);
    if (!CHECK(run_program(&out, "--resume e.st --steps 24 --sample 0") == 0)) puts(out);
    free(out);
    if (!CHECK(run_program(&out, "--eval e.st") == 0)) puts(out);
    free(out);
    if (!CHECK(run_program(&out, "--init e.st --data short_greek.txt --separator=\\n --steps 2 --sample 4") == 0))
        puts(out);
    free(out);
    if (!CHECK(run_program(&out, "--generate e.st --sample 50") == 0)) puts(out);
    free(out);
    CHECK(says(2, "--resume e.st --split tail", "split: tail differs from tracks, the value in e.st", ""));
    if (!CHECK(run_program(&out, "%s --data greek.txt --split tracks --stateful --steps 4 --sample 0", options) == 0))
        puts(out);
    free(out);
}

enum { PLAN_COLUMNS = 18 }; /* columns after name and dtype */
enum { PLAN_TRAINING = 13, PLAN_RECOMPUTE = 17 };

/* Reads a row of a plan.  Returns 0 if the line is no such row. */
static int plan_row(const char *line, char dtype[16], double x[PLAN_COLUMNS]) {
    int at = 0;
    if (sscanf(line, "%*[^,],%15[^,]%n", dtype, &at) != 1 || !at) return 0;
    for (int i = 0; i < PLAN_COLUMNS; i++) {
        char *end;
        if (line[at] != ',') return 0;
        x[i] = strtod(line + at + 1, &end);
        if (end == line + at + 1) return 0;
        at = (int)(end - line);
    }
    return !line[at];
}

/* Runs --plan for one model and batch, and reads its row. */
static void one_plan(const char *options, double x[PLAN_COLUMNS]) {
    char *out, dtype[16], *row;
    for (int i = 0; i < PLAN_COLUMNS; i++) x[i] = NAN;
    CHECK(run_program(&out, "%s", options) == 0);
    row = strstr(out, "\nHY,");
    if (row) row[strcspn(row + 1, "\n") + 1] = 0;
    CHECK(row && plan_row(row + 1, dtype, x));
    free(out);
}

/* For HY with 8 windows of 4096 tokens, --recompute must need at most 40 % of the memory, and the plan must say so. */
static void test_plan_recompute(void) {
    double x[PLAN_COLUMNS], again[PLAN_COLUMNS];
    one_plan("--plan 8 --seq 4096 --model HY", x);
    one_plan("--plan 8 --seq 4096 --model HY --recompute", again);
    CHECK(x[PLAN_RECOMPUTE] <= 0.4 * x[PLAN_TRAINING] && again[PLAN_TRAINING] == x[PLAN_RECOMPUTE]);
    CHECK(again[PLAN_RECOMPUTE] == x[PLAN_RECOMPUTE] && again[9] < 0.2 * x[9] && again[14] == x[14]);
    printf("  %.1f of %.1f MiB\n", x[PLAN_RECOMPUTE], x[PLAN_TRAINING]);
}

/* Runs with an option that saves memory: recomputed layers, or other fused operators.  Every number of the run must
 * stay the same, from the first gate to the sample, and memory must be less. */
static void check_less_memory(const char *options, const char *with) {
    char *out[2], *numbers[2];
    double memory[2];
    int rows;
    for (int k = 0; k < 2; k++) {
        CHECK(run_program(&out[k], "%s --csv run.csv --steps 5 --eval-every 2 --sample 8 %s", options, k ? with : "") ==
              0);
        numbers[k] = numbers_of("run.csv", &rows);
        const char *line = strstr(out[k], "\nmemory ");
        CHECK(rows == 6 && line && sscanf(line, "\nmemory %lf", &memory[k]) == 1);
    }
    if (!CHECK(!strcmp(numbers[0], numbers[1]) && final_loss(out[0]) == final_loss(out[1])))
        printf("  %s\n%s%s", options, numbers[0], numbers[1]);
    CHECK(memory[1] < memory[0]);
    const char *text[2] = {strstr(out[0], "\nsample\n"), strstr(out[1], "\nsample\n")};
    CHECK(text[0] && text[1] && !strncmp(text[0], text[1], 140));
    for (int k = 0; k < 2; k++) free(out[k]), free(numbers[k]);
}

static void check_recompute(const char *options) { check_less_memory(options, "--recompute"); }

/* With conv_ssd, HY must need less memory for 8 windows of 4096 tokens.  It keeps no convolved rows, which take 24 MiB
 * in each layer, and no gradient of these rows.  Its workspace holds the rows of one layer.  Mamba-2 alone always uses
 * conv_ssd. */
static void test_fuse(void) {
    char *out;
    double x[PLAN_COLUMNS], less[PLAN_COLUMNS];
    one_plan("--plan 8 --seq 4096 --model HY", x);
    one_plan("--plan 8 --seq 4096 --model HY --fuse conv_ssd", less);
    CHECK(fabs(x[9] - less[9] - 8 * 24) < 0.5 && fabs(x[10] - less[10] - 24) < 0.5 && x[12] < less[12]);
    CHECK(less[PLAN_TRAINING] < x[PLAN_TRAINING] && less[8] == x[8] && less[6] == x[6]);
    check_less_memory("--device cpu --data greek.txt --hidden 32 --layers 3 --batch 4 --seq 32", "--fuse conv_ssd");
    check_less_memory("--device cpu --data greek.txt --model CP --hidden 32 --layers 3 --batch 4 --seq 32 --stateful",
                      "--fuse=conv_ssd");
    CHECK(run_program(&out, "--device cpu --data greek.txt --model Mamba-2 --hidden 32 --layers 1 --batch 2 --seq 16 "
                            "--profile") == 0);
    CHECK(strstr(out, "\nmamba,conv_ssd,backward,1,") && !strstr(out, "conv1d") && !strstr(out, "\nbranches "));
    free(out);
    CHECK(says(2, "--fuse all", "fuse: 'all'", ""));
}

static void test_recompute(void) {
    int count;
    const hy_config *list = hy_model_list(&count);
    for (int i = 0; i < count; i++) {
        char options[256];
        snprintf(options, sizeof options, "--device cpu --data greek.txt --model %s --hidden 32 --layers 3 %s %s",
                 list[i].name, is_short ? "--batch 2 --seq 16 --eval-tokens 32" : "--batch 4 --seq 32",
                 i % 2 ? "--stateful" : "");
        check_recompute(options);
    }
}

/* Plans need no GPU.  Their parts must add up and grow with the batch, also for models that are too large for this
 * machine. */
static void test_plan(void) {
    char *out, *save;
    int rows = 0, count;
    hy_model_list(&count);
    CHECK(run_program(&out, "--plan 1,4 --seq 64 --dtype f16") == 0);
    double before = 0;
    for (char *line = strtok_r(out, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        double x[PLAN_COLUMNS], sum = 0;
        char dtype[16];
        if (!plan_row(line, dtype, x)) continue;
        for (int i = 6; i < 13; i++) sum += x[i];
        CHECK(!strcmp(dtype, "f16") && x[4] == (rows % 2 ? 4 : 1) && x[5] == 64 && fabs(sum - x[13]) < 0.5);
        CHECK(x[14] < x[13] && fabs(x[15] * x[4] * x[5] / 1024 - x[13]) < 0.1);
        if (rows % 2) CHECK(x[13] > before);
        before = x[13];
        rows++;
    }
    CHECK(rows == 2 * count);
    free(out);
    /* 16 bytes for every parameter, and 2 for its 16-bit copy, give numbers above 32 bits */
    CHECK(says(0, "--plan 16 --seq 1024 --model GF --hidden 2048 --layers 13 --head-size 64",
               ",1053864525,16,1024,6030.3,4020.2,8040.4,", "GF,bf16,2048,13,62,"));
    CHECK(says(2, "--plan 1 --heads 3", "heads = 3: must divide hidden = 128", "hybrid_train: "));
    CHECK(says(2, "--plan 1 --save x.st", "--plan does not train", "leave --save out"));
}

#define ON_DEVICE "--device cuda --data short_greek.txt --hidden 32 --layers 1 --batch 2 --seq 16 "
static const char *const dtypes[] = {"f32", "bf16", "f16"};

/* Whether there is no GPU, so that the tests are skipped.  If the program fails to start for another reason, tests
 * fail. */
static int device_is_absent(void) {
    char *out;
    int status = run_program(&out, ON_DEVICE "--steps 1");
    int absent = status == 1 && !gpu_is_present() &&
                 (strstr(out, "no CUDA-capable device") || strstr(out, "driver version is insufficient"));
    if (absent) printf("SKIP: %s", out);
    free(out);
    return absent;
}

static void test_device_bench(void) {
    check_bench("--device cuda --bench-runs 3 --dtype f32", "8", 2, 1e-3);
    check_bench("--device cuda --bench-runs 3 --dtype bf16", "8", 2, 0.3);
    check_bench_generate("--device cuda", "", "generate");
    check_bench_generate("--device cuda", "--weights int8", "generate-int8");
}

static void test_device_check(void) {
    for (int i = 0; i < 3; i++) {
        char line[256];
        snprintf(line, sizeof line, ON_DEVICE "--hidden 64 --check --dtype %s", dtypes[i]);
        CHECK(says(0, line, "gradient  layers.0.rwkv.mix_up", "0 over the limit"));
        snprintf(line, sizeof line, ON_DEVICE "--check --dtype %s", dtypes[i]); /* this model has one Mamba head */
        CHECK(says(0, line, "gradient  layers.0.mamba.Dskip", "0 over the limit"));
    }
}

/* Training on the device must learn as on the CPU, and must repeat bit for bit, in every dtype. */
static void test_device_trains(void) {
    const char *rest = "--steps 12 --lr 0.01 --eval-every 5 --eval-tokens 64 --sample 5 --csv run.csv";
    char *cpu;
    CHECK(run_program(&cpu, ON_DEVICE "--device cpu %s", rest) == 0);
    for (int i = 0; i < 3; i++) {
        char *out[2], *numbers[2];
        int rows;
        for (int k = 0; k < 2; k++) {
            if (!CHECK(run_program(&out[k], ON_DEVICE "--dtype %s %s", dtypes[i], rest) == 0)) puts(out[k]);
            numbers[k] = numbers_of("run.csv", &rows);
            CHECK(rows == 13);
        }
        CHECK(!strcmp(numbers[0], numbers[1]) && final_loss(out[0]) == final_loss(out[1]));
        printf("  %s: held-out loss %.4f, on the CPU %.4f\n", dtypes[i], final_loss(out[0]), final_loss(cpu));
        CHECK(fabs(final_loss(out[0]) - final_loss(cpu)) < (i ? 0.1 : 1e-3));
        for (int k = 0; k < 2; k++) free(out[k]), free(numbers[k]);
    }
    free(cpu);
}

/* Tests --recompute and --fuse in whole runs, in every dtype.  test_hybrid_ops tests all models. */
static void test_device_recompute(void) {
    for (int i = 0; i < 3; i++) {
        char line[256];
        /* so many tokens that activations take more memory than the kernels' own buffers */
        snprintf(line, sizeof line, ON_DEVICE "--layers 2 --batch 8 --seq 128 --dtype %s --stateful", dtypes[i]);
        check_recompute(line);
        check_less_memory(line, "--fuse conv_ssd");
    }
    CHECK(says(0, ON_DEVICE "--hidden 64 --layers 2 --check --dtype f32 --recompute", "layers.0.rwkv.wkv",
               "0 over the limit"));
}

static void test_device_profile(void) {
    check_profile("--device cuda --dtype f32", 4, 0, 1);
    check_profile("--device cuda --dtype bf16", 2, 1, 0);
}

/* Runs with carried states, and with every way to mix the branches. */
static void test_device_models(void) {
    static const char *const models[] = {"HY", "GF", "WS", "RF", "CP"};
    for (int i = 0; i < 5; i++) {
        char line[256];
        snprintf(line, sizeof line, ON_DEVICE "--model %s --steps 3 --sample 0 --stateful", models[i]);
        CHECK(says(0, line, models[i], "held-out loss "));
    }
}

static void test_all(void) {
    run_case("options: defaults", test_options_defaults);
    run_case("options: values", test_options_values);
    run_case("options: refused", test_options_refused);
    run_case("options: of modes", test_options_of_modes);
    run_case("options: config file", test_options_file);
    run_case("data: split", test_split);
    run_case("data: vocabulary", test_vocabulary);
    run_case("data: unigram entropy", test_entropy);
    run_case("data: documents", test_documents);
    run_case("data: files", test_files);
    run_case("data: held-out share", test_held_out_share);
    run_case("data: other texts", test_other_texts);
    run_case("data: held-out windows", test_held_out);
    run_case("data: random windows", test_random_windows);
    run_case("data: tracks", test_tracks);
    run_case("data: numbers", test_numbers);
    run_case("data: end symbol", test_end_symbol);
    run_case("data: split of tracks", test_tracks_split);
    run_case("data: refused", test_texts_refused);
    run_case("gates", test_gates);
    run_case("gates of all models", test_gates_of_models);
    run_case("program: help", test_help);
    run_case("program: schedules", test_schedules);
    run_case("program: quiet", test_quiet);
    run_case("program: every option in every mode", test_matrix);
    run_case("program: options without effect", test_without_effect);
    run_case("memory of a container", test_memory_limit);
    run_case("program: errors", test_errors);
    run_case("program: device", test_device);
    run_case("program: bench", test_bench);
    run_case("program: bench of generation", test_bench_generate);
    run_case("program: profile", test_profile);
    run_case("program: plan", test_plan);
    run_case("program: plan, recompute", test_plan_recompute);
    run_case("program: recompute", test_recompute);
    run_case("program: fuse", test_fuse);
    run_case("program: kinds of text", test_kinds_of_text);
    if (!is_short) {
        run_case("program: models", test_models);
        run_case("program: learns the fables", test_learns_fables);
        run_case("program: learns another text", test_learns_another_text);
        run_case("program: gate of a long run", test_gate_of_long_run);
        run_case("program: repeats", test_repeats);
        run_case("program: gates-strict", test_gates_strict);
    }
    run_case("program: csv", test_csv);
    run_case("program: binary text", test_binary_text);
    run_case("program: not finite", test_not_finite);
    run_case("program: interrupt", test_interrupt);
    run_case("program: interrupt twice", test_interrupt_twice);
}

/* With a single rank, NCCL multiplies the gradient by 1, in several buckets, so it must change no bit.  Four steps run,
 * because the device records steps and replays them from the third on.  Machines may lack NCCL. */
static void test_device_nccl(void) {
    static const char *const uses[] = {"off", "on", "on --micro-batch 1", "off --micro-batch 1"};
    char *numbers[4] = {NULL}, *out;
    int rows;
    for (int i = 0; i < 4; i++) {
        const int status = run_program(&out,
                                       "--device cuda --data greek.txt --hidden 160 --layers 5 --batch 2 --seq 16 "
                                       "--steps 4 --sample 0 --csv run.csv --nccl %s",
                                       uses[i]);
        const int is_absent = i == 1 && status && strstr(out, "nccl: libnccl.so.2: cannot open shared object file");
        if (is_absent) printf("  no NCCL: its sums are not tested\n");
        if (!is_absent && !CHECK(status == 0 && (i % 3 == 0 || strstr(out, "added up by NCCL")))) puts(out);
        free(out);
        if (status) break;
        numbers[i] = numbers_of("run.csv", &rows);
        remove("run.csv");
    }
    if (numbers[3]) CHECK(!strcmp(numbers[0], numbers[1]) && !strcmp(numbers[2], numbers[3]));
    for (int i = 0; i < 4; i++) free(numbers[i]);
}

static void test_all_on_device(void) {
    run_case("device: check", test_device_check);
    run_case("device: trains", test_device_trains);
    run_case("device: models", test_device_models);
    run_case("device: recompute", test_device_recompute);
    run_case("device: profile", test_device_profile);
    run_case("device: bench", test_device_bench);
    run_case("device: nccl", test_device_nccl);
}

int main(int argc, char **argv) {
    const char *path = argc > 1 ? argv[1] : getenv("HYBRID_TRAIN");
    int on_device = argc > 2 && !strcmp(argv[2], "device"), absent = 0;
    is_short = argc > 2 && !strcmp(argv[2], "short");
    int status = begin_tests(path);
    if (status) return status;
    if (!on_device)
        test_all();
    else if (!(absent = device_is_absent()))
        test_all_on_device();
    status = end_tests();
    return absent ? 77 : status;
}
