/* Tests of model files: the program must write and read them without change, and notice every damage of a file and
 * every failure of the disk.
 *
 *     test_files [short]       short: every 29th fault
 */
#define _GNU_SOURCE /* renameat, syscall */
#include "hybrid_generate.h"
#include "hybrid_save.h"
#include "hybrid_sha256.h"
#include "trainer.h"
#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int every; /* the test tries every n-th fault, where n is this number */

/* ---- a disk that fails -------------------------------------------------------------------------
 * The writer calls the next functions in place of the C library's functions, so that a chosen call can fail. */

enum { FAIL_NEVER = -1 };
static int write_calls, failing_write = FAIL_NEVER;
static int fsync_calls, failing_fsync = FAIL_NEVER;
static int failing_rename;

ssize_t write(int file, const void *bytes, size_t count) {
    if (write_calls++ == failing_write) {
        errno = ENOSPC;
        return -1;
    }
    return syscall(SYS_write, file, bytes, count);
}

int fsync(int file) {
    (void)file; /* tests need no file on disk, so this saves time */
    if (fsync_calls++ != failing_fsync) return 0;
    errno = EIO;
    return -1;
}

int rename(const char *from, const char *to) {
    if (!failing_rename) return renameat(AT_FDCWD, from, AT_FDCWD, to);
    errno = EACCES;
    return -1;
}

/* ---- helpers ------------------------------------------------------------------------------- */

static int exists(const char *path) { return !access(path, F_OK); }

static uint8_t *read_bytes(const char *path, size_t *size) {
    struct stat about;
    FILE *file = fopen(path, "rb");
    if (!file || fstat(fileno(file), &about)) abort();
    *size = (size_t)about.st_size;
    uint8_t *bytes = malloc(*size + 1);
    if (!bytes || fread(bytes, 1, *size, file) != *size) abort();
    fclose(file);
    return bytes;
}

/* Whether the last error contains the text. */
static int error_says(const char *text) {
    if (strstr(hy_last_error(), text)) return 1;
    printf("  the error is: %s\n", hy_last_error());
    return 0;
}

/* Whether the program refuses the file with this reason. */
static int refused(const char *path, const char *text) {
    hy_file file;
    gt_status status = hy_saved_open(&file, path);
    hy_file_close(&file);
    if (status == GT_OK) printf("  accepted, not '%s'\n", text);
    return status != GT_OK && error_says(text) && strstr(hy_last_error(), path);
}

/* A new model, and all other data of its file. */
typedef struct sample {
    hy_backend *cpu;
    hy_options options;
    hy_text text;
    hy_tracks tracks;
    hy_run run;
} sample;

static sample *new_sample(int stateful) {
    static const char words[] = "the quick brown fox jumps over the lazy dog. \"why?\"\n\n\n";
    static char *const argv[] = {"hybrid_train", "--hidden", "16",       "--layers",          "1",
                                 "--batch",      "2",        "--prompt", "a\\x01\\xff\\\\\"", NULL};
    static char bytes[40 * sizeof words];
    sample *s = calloc(1, sizeof *s);
    if (!s) abort();
    hy_config config = *hy_model_list(&(int){0});
    config.hidden = 16, config.layers = 1, config.heads = 0, config.stateful = stateful;
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = words[i % (sizeof words - 1)];
    CHECK(hy_options_parse(&s->options, 9, argv) == GT_OK);
    CHECK(hy_options_default(&s->options, 0) == GT_OK);
    s->options.stateful = stateful;
    strcpy(s->options.model, "HY");
    CHECK(hy_text_from_bytes(&s->text, bytes, sizeof bytes, "") == GT_OK);
    CHECK(hy_tracks_create(&s->tracks, &s->text, 2) == GT_OK);
    CHECK(hy_backend_cpu(&s->cpu) == GT_OK);
    s->run = (hy_run){.options = &s->options, .text = &s->text, .device = "cpu"};
    s->run.progress = (hy_progress){
        .steps = 7, .tokens = 99, .random = UINT64_MAX - 5, .loss_scale = 1, .first_loss = 1.0 / 3, .held_out = -1};
    if (stateful) s->run.tracks = &s->tracks;
    hy_text_sum(&s->text, s->run.text_sum);
    CHECK(hy_model_create(s->cpu, &config, s->text.vocab, 2, 8, 5, &s->run.model) == GT_OK);
    hy_model_set_steps(s->run.model, 6);
    return s;
}

static void free_sample(sample *s) {
    hy_model_destroy(s->run.model);
    hy_tracks_free(&s->tracks);
    hy_text_free(&s->text);
    s->cpu->close(s->cpu);
    free(s);
}

/* Fills all tensors of the model with numbers that tell their tensor and index, starting at `first`. */
static void mark(hy_model *model, double first) {
    int count;
    hy_tensor *list = hy_model_tensors(model, &count);
    for (int i = 0; i < count; i++) {
        double *x = malloc((size_t)list[i].count * sizeof *x);
        for (int64_t k = 0; k < list[i].count; k++) x[k] = (float)(first + i + 1e-4 * (double)k);
        CHECK(hy_model_write_tensor(model, list + i, x) == GT_OK);
        free(x);
    }
    CHECK(hy_model_written(model) == GT_OK);
    free(list);
}

/* Counts the numbers in tensors of this kind that mark(model, first) did not write. */
static int64_t unmarked(hy_model *model, hy_kind kind, double first) {
    int64_t different = 0;
    int count;
    hy_tensor *list = hy_model_tensors(model, &count);
    for (int i = 0; i < count; i++) {
        double *x = malloc((size_t)list[i].count * sizeof *x);
        CHECK(hy_model_read_tensor(model, list + i, x) == GT_OK);
        for (int64_t k = 0; list[i].kind == kind && k < list[i].count; k++)
            different += x[k] != (float)(first + i + 1e-4 * (double)k);
        free(x);
    }
    free(list);
    return different;
}

/* Opens and loads a file as --resume does, but does not check the options. */
static gt_status load(const char *path, sample *s) {
    hy_file file;
    gt_status status = hy_saved_open(&file, path);
    if (status == GT_OK) status = hy_load_run(&file, &s->run);
    hy_file_close(&file);
    return status;
}

/* ---- SHA-256 ------------------------------------------------------------------------------- */

static const char *sha256_of(const void *bytes, size_t size, size_t first) {
    static char hex[65];
    hy_sha256 sum;
    hy_sha256_start(&sum);
    hy_sha256_add(&sum, bytes, first);
    hy_sha256_add(&sum, (const char *)bytes + first, size - first);
    hy_sha256_end(&sum, hex);
    return hex;
}

/* The examples of FIPS 180-4.  The second is also hashed in two parts, cut at every place. */
static void test_sha256(void) {
    static const char two[] = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
    static char million[1000000];
    for (size_t i = 0; i <= sizeof two - 1; i++)
        CHECK(!strcmp(sha256_of(two, sizeof two - 1, i),
                      "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"));
    CHECK(!strcmp(sha256_of("abc", 3, 1), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"));
    CHECK(!strcmp(sha256_of("", 0, 0), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"));
    memset(million, 'a', sizeof million);
    CHECK(!strcmp(sha256_of(million, sizeof million, 77),
                  "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"));
}

/* ---- the format ---------------------------------------------------------------------------- */

/* Writes a file with this header and `data` bytes of data. */
static const char *write_raw(const char *header, size_t data) {
    static uint8_t bytes[4096];
    size_t n = strlen(header);
    memset(bytes, 0, sizeof bytes);
    bytes[0] = (uint8_t)n;
    bytes[1] = (uint8_t)(n >> 8);
    memcpy(bytes + 8, header, n);
    return write_file("raw.st", bytes, 8 + n + data);
}

static void test_round_trip(void) {
    static const char *const texts[] = {"", "a \"b\" \\ c", "\x01\t\n\x7f", "plain"};
    float f[6] = {1, -2, 3e-38f, 4, 5, 6}, got[6];
    int64_t shape[2] = {2, 3}, n = 1, whole = INT64_MIN + 5, got_whole;
    hy_file_writer *w;
    hy_file file;
    char key[16];
    CHECK(hy_writer_open(&w, "a.st") == GT_OK);
    for (int i = 0; i < 4; i++) {
        snprintf(key, sizeof key, "k\"%d", i);
        CHECK(hy_writer_text(w, key, texts[i]) == GT_OK);
    }
    CHECK(hy_writer_tensor(w, "w", HY_FILE_I64, 1, &n) == GT_OK);
    CHECK(hy_writer_tensor(w, "b.x", HY_FILE_F32, 2, shape) == GT_OK);
    CHECK(hy_writer_tensor(w, "scalar", HY_FILE_F32, 0, NULL) == GT_OK);
    CHECK(hy_writer_begin(w) == GT_OK && hy_writer_data(w, &whole, 8) == GT_OK);
    CHECK(hy_writer_data(w, f, 24) == GT_OK && hy_writer_data(w, f, 4) == GT_OK);
    CHECK(!exists("a.st") && exists("a.st.tmp"));
    CHECK(hy_writer_end(w, GT_OK) == GT_OK && exists("a.st") && !exists("a.st.tmp"));
    CHECK(hy_file_open(&file, "a.st") == GT_OK);
    CHECK(file.tensor_count == 3 && file.text_count == 5 && file.data % 8 == 0);
    for (int i = 0; i < 4; i++) {
        snprintf(key, sizeof key, "k\"%d", i);
        CHECK(!strcmp(hy_file_text_of(&file, key), texts[i]));
    }
    const hy_file_tensor *b = hy_file_tensor_of(&file, "b.x");
    CHECK(b && b->rank == 2 && b->shape[0] == 2 && b->shape[1] == 3 && b->count == 6);
    CHECK(hy_file_read(&file, b, got) == GT_OK && !memcmp(got, f, sizeof f));
    CHECK(hy_file_read(&file, hy_file_tensor_of(&file, "w"), &got_whole) == GT_OK);
    CHECK(got_whole == whole && !hy_file_tensor_of(&file, "b") && !hy_file_text_of(&file, "k"));
    hy_file_close(&file);
}

static void test_forms(void) {
    hy_file file;
    /* a header may have its keys in any order and with spaces, and dtypes that this program does not write */
    CHECK(hy_file_open(&file, write_raw("{ \"a\" : {\"shape\":[2], \"data_offsets\":[ 0,8 ],\"dtype\":\"F32\"}"
                                        ",\"b\":{\"dtype\":\"F16\",\"shape\":[1,2],\"data_offsets\":[8,12]},"
                                        "\"__metadata__\":{\"\\u00e9\\/\":\"\\u20AC\"}}  \n",
                                        12)) == GT_OK);
    CHECK(file.tensor_count == 2 && !strcmp(hy_file_text_of(&file, "\xc3\xa9/"), "\xe2\x82\xac"));
    hy_file_close(&file);
    CHECK(hy_file_open(&file, write_raw("{}", 0)) == GT_OK && file.tensor_count == 0);
    hy_file_close(&file);
}

#define T8 ":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}"
#define T16 ":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,16]}"
#define PLACE(shape, offsets) "{\"a\":{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":" offsets "}}"
static void test_refused_headers(void) {
    static const struct {
        const char *header;
        size_t data;
        const char *reason;
    } cases[] = {
        {"{\"a\"" T8 "", 8, "'}' is missing"},
        {"{\"a\"" T8 "}x", 8, "follows its end"},
        {"{\"a\"" T8 ",}", 8, "'\"' is missing"},
        {"{\"a\"" T8 ",\"a\"" T16 "}", 16, "a occurs twice"},
        {"{\"a\"" T8 ",\"a\"" T8 "}", 8, "a occurs twice"},
        {"{\"a\"" T8 ",\"b\"" T8 "}", 8, "does not begin where"},
        {"{\"a\"" T16 "}", 16, "does not begin where"},
        {"{\"a\"" T8 "}", 7, "cut short: it has"},
        {"{\"a\"" T8 "}", 9, "1 extra bytes follow its end"},
        {PLACE("[3]", "[0,8]"), 8, "does not match its data_offsets"},
        {PLACE("[2]", "[8,0]"), 8, "does not match its data_offsets"},
        {PLACE("[2.0]", "[0,8]"), 8, "not whole"},
        {PLACE("[2e0]", "[0,8]"), 8, "not whole"},
        {PLACE("[02]", "[0,8]"), 8, "not whole"},
        {PLACE("[-2]", "[0,8]"), 8, "a number is missing"},
        {PLACE("[]", "[0,8]"), 8, "does not match its data_offsets"},
        {PLACE("[99999999999999999999]", "[0,8]"), 8, "too large"},
        {PLACE("[9007199254740992,9007199254740992]", "[0,8]"), 8, "too large"},
        {PLACE("[4611686018427387905]", "[0,8]"), 8, "too large"},
        {PLACE("[1,1,1,1,1,1,1,1,2]", "[0,8]"), 8, "more than 8 numbers"},
        {PLACE("[2]", "[0]"), 8, "lacks dtype, shape or data_offsets"},
        {PLACE("[2]", "[0,8,8]"), 8, "lacks dtype, shape or data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8, "lacks dtype, shape or data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\"}}", 8, "key 'dtype'"},
        {"{\"a\":{\"type\":\"F32\"}}", 8, "key 'type'"},
        {"{\"a\":[]}", 0, "'{' is missing"},
        {"{\"a\\q\"" T8 "}", 8, "unknown escape"},
        {"{\"a\\ u0031\"" T8 "}", 8, "unknown escape"},
        {"{\"a\\\n\tu0031\"" T8 "}", 8, "unknown escape"},
        {"{\"a\\u 031\"" T8 "}", 8, "four hexadecimal digits"},
        {"{\"a\\u00x0\"" T8 "}", 8, "four hexadecimal digits"},
        {"{\"a\\u0000\"" T8 "}", 8, "a NUL"},
        {"{\"a\n\"" T8 "}", 8, "control character"},
        {"{\"__metadata__\":{\"a\":1}}", 0, "'\"' is missing"},
        {"{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}", 0, "'a' occurs twice"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, "the key __metadata__ occurs twice"},
        {"{\"__metadata__\":{\"checksum\":\"sha256:123\"}}", 0, "the checksum is not"},
        {"{\"__metadata__\":{\"checksum\":\"sha256:0000000000000000000000000000000000000000000000"
         "000000000000000000\"}}",
         0, "its checksum is wrong"},
        {"{\"a\"" T8 "}", 8, "not a model file of hybrid_train"},
        {"{\"__metadata__\":{\"hybrid_train_format\":\"4\"}}", 0, "format is '4'"},
        {"{\"__metadata__\":{\"hybrid_train_format\":\"1\",\"checksun\":\"\"}}", 0, "unknown key 'checksun'"},
        {"[\"a\"]", 0, "not a safetensors file"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        if (!CHECK(refused(write_raw(cases[i].header, cases[i].data), cases[i].reason))) puts(cases[i].header);
    write_string("text.st", "Once upon a time there was no file of this kind.");
    CHECK(refused("text.st", "not a safetensors file"));
    CHECK(refused(write_string("text.st", "Once"), "cut short, or not a safetensors file"));
    CHECK(refused(write_string("text.st", ""), "the file is empty"));
    CHECK(refused("missing.st", "No such file"));
    CHECK(refused(".", "not a regular file") && refused("/dev/null", "not a regular file"));
}

/* ---- model files --------------------------------------------------------------------------- */

static void check_saved(int stateful) {
    sample *a = new_sample(stateful), *b = new_sample(stateful);
    mark(a->run.model, 1);
    mark(b->run.model, -500);
    a->tracks.next[1] += 11;
    a->run.progress.recent.ratio[3] = NAN;
    a->run.progress.recent.ratio[4] = INFINITY;
    a->run.progress.recent.tokens[19] = INT64_MAX;
    CHECK(hy_save(&a->run, "a.st") == GT_OK && !exists("a.st.tmp"));
    memset(&b->run.progress, 0, sizeof b->run.progress);
    if (!CHECK(load("a.st", b) == GT_OK)) puts(hy_last_error());
    for (int kind = HY_WEIGHT; kind <= HY_STATE; kind++) CHECK(unmarked(b->run.model, (hy_kind)kind, 1) == 0);
    CHECK(hy_model_steps(b->run.model) == 6);
    hy_progress *p = &a->run.progress, *q = &b->run.progress;
    CHECK(isnan(q->recent.ratio[3]));
    p->recent.ratio[3] = q->recent.ratio[3] = 0;
    CHECK(!memcmp(p, q, sizeof *p));
    if (stateful) CHECK(!memcmp(a->tracks.next, b->tracks.next, 2 * sizeof(int64_t)));
    if (stateful) CHECK(!memcmp(a->tracks.document, b->tracks.document, 2 * sizeof(int64_t)));
    free_sample(a);
    free_sample(b);
}

static void test_saved(void) {
    check_saved(0);
    check_saved(1);
}

/* A saved file must give back the same options, even if their strings contain unusual bytes. */
static void test_saved_options(void) {
    sample *s = new_sample(0);
    hy_file file;
    hy_options o = {.help = 0};
    s->options.lr = 1.0 / 3;
    s->options.seed = 9007199254740991;
    CHECK(hy_save(&s->run, "a.st") == GT_OK && hy_saved_open(&file, "a.st") == GT_OK);
    CHECK(hy_saved_options(&file, HY_TAKE_STRICTLY, &o) == GT_OK);
    CHECK(o.lr == 1.0 / 3 && o.seed == 9007199254740991 && o.hidden == 16 && o.batch == 2);
    CHECK(!strcmp(o.prompt, "a\x01\xff\\\"") && !strcmp(o.model, "HY") && !o.stateful);
    hy_file_close(&file);
    free_sample(s);
}

/* Replaces `from` by `to`, which has the same length, in all keys that begin with `from`.  Returns how many were
 * found. */
static int rename_keys(uint8_t *bytes, size_t size, const char *from, const char *to) {
    int found = 0;
    char *at = (char *)bytes;
    while ((at = memmem(at, (size_t)((char *)bytes + size - at), from, strlen(from)))) {
        memcpy(at, to, strlen(to));
        found++;
    }
    return found;
}

/* Files of format 2 lack options and numbers that were added later.  Files of format 1 also lack the numbers of heads
 * and other sizes, so the program derives them from the weights. */
static void test_older_format(void) {
    enum { OF_SECOND = 8 };
    static const char *const newer[][2] = {{"\"hybrid_train_format\":\"3\"", "\"hybrid_train_format\":\"2\""},
                                           {"\"option.schedule", "\"user.x_schedule"},
                                           {"\"option.ema", "\"user.x_ema"},
                                           {"\"option.held-out", "\"user.x_held-out"},
                                           {"\"run.best\"", "\"user.bst\""},
                                           {"\"run.best_step", "\"user.bst_step"},
                                           {"\"option.recompute", "\"user.x_recompute"},
                                           {"\"option.fuse", "\"user.x_fuse"},
                                           {"\"option.heads", "\"user.x_heads"},
                                           {"\"option.d-state", "\"user.x_d-state"},
                                           {"\"option.expand", "\"user.x_expand"},
                                           {"\"option.d-conv", "\"user.x_d-conv"},
                                           {"\"option.mamba-head", "\"user.x_mamba-head"},
                                           {"\"option.ffn", "\"user.x_ffn"},
                                           {"\"hybrid_train_format\":\"2\"", "\"hybrid_train_format\":\"1\""}};
    sample *s = new_sample(0);
    hy_options o = {.help = 0};
    hy_file file;
    size_t size;
    mark(s->run.model, 1);
    CHECK(hy_save(&s->run, "a.st") == GT_OK && hy_file_open(&file, "a.st") == GT_OK);
    int64_t sum = 8 + file.checksum_at;
    hy_file_close(&file);
    uint8_t *bytes = read_bytes("a.st", &size);
    for (size_t i = 0; i < sizeof newer / sizeof newer[0]; i++) {
        CHECK(rename_keys(bytes, size, newer[i][0], newer[i][1]) == 1);
        memset(bytes + sum, '0', 64);
        memcpy(bytes + sum, sha256_of(bytes, size, 0), 64);
        if (i >= OF_SECOND) continue;
        write_file("old.st", bytes, size); /* a file of format 2 that lacks the options and numbers up to i */
        CHECK(hy_saved_open(&file, "old.st") == GT_OK && hy_saved_options(&file, HY_TAKE_STRICTLY, &o) == GT_OK);
        CHECK(i < 6 || !o.recompute);
        hy_file_close(&file);
        memset(&o, 0, sizeof o);
        if (!CHECK(load("old.st", s) == GT_OK)) puts(hy_last_error());
    }
    write_file("old.st", bytes, size);
    CHECK(hy_saved_open(&file, "old.st") == GT_OK && hy_saved_options(&file, HY_TAKE_STRICTLY, &o) == GT_OK);
    CHECK(o.heads == 1 && o.hidden == 16 && o.d_state == 0 && o.ffn == 0);
    hy_file_close(&file);
    mark(s->run.model, 2);
    if (!CHECK(load("old.st", s) == GT_OK)) puts(hy_last_error());
    CHECK(unmarked(s->run.model, HY_WEIGHT, 1) == 0);
    CHECK(rename_keys(bytes, size, "_format\":\"1\"", "_format\":\"4\"") == 1);
    memcpy(memmem(bytes, size, "\"checksum\"", 10), "\"user.sum\"", 10);
    write_file("later.st", bytes, size);
    CHECK(hy_saved_open(&file, "later.st") != GT_OK &&
          error_says("its format is '4', but this program knows only '1', '2' and '3'"));
    hy_file_close(&file);
    free(bytes);
    free_sample(s);
}

/* The reader accepts only what the writer writes: \xNN needs two hexadecimal digits. */
static void test_damaged_options(void) {
    static const char *const bad[] = {"x 1", "x+1", "x1 ", "x1g", "x00", "y01"};
    sample *s = new_sample(0);
    hy_file file;
    size_t size;
    CHECK(hy_save(&s->run, "a.st") == GT_OK);
    uint8_t *bytes = read_bytes("a.st", &size);
    char *sum = memmem(bytes, size, "checksum", 8), *byte = memmem(bytes, size, "a\\\\x01", 6);
    for (size_t i = 0; sum && byte && i < sizeof bad / sizeof bad[0]; i++) {
        hy_options o = {.help = 0};
        memcpy(sum, "user.sum", 8);
        memcpy(byte + 3, bad[i], 3);
        write_file("b.st", bytes, size);
        CHECK(hy_saved_open(&file, "b.st") == GT_OK);
        if (!CHECK(hy_saved_options(&file, HY_TAKE_ALL, &o) != GT_OK &&
                   error_says("b.st: damaged: key option.prompt has the value 'a\\")))
            puts(bad[i]);
        hy_file_close(&file);
    }
    CHECK(sum && byte);
    free(bytes);
    free_sample(s);
}

/* A file with a checksum must have every option.  A file without a checksum comes from another program, and must have
 * the options of the model.  Only option.untied may be missing: the head is then tied. */
static void test_missing_options(void) {
    static const struct {
        const char *key, *renamed;
        int is_needed[2]; /* whether the option is needed: in a file with checksum, in a file without */
    } cases[] = {{"\"option.batch", "\"user.x_batch", {1, 0}}, {"\"option.ffn", "\"user.x_ffn", {1, 1}}};
    sample *s = new_sample(0);
    hy_file file;
    size_t size;
    CHECK(hy_save(&s->run, "a.st") == GT_OK && hy_file_open(&file, "a.st") == GT_OK);
    const int64_t sum = 8 + file.checksum_at;
    CHECK(!hy_file_text_of(&file, "option.untied"));
    hy_file_close(&file);
    for (int i = 0; i < 4; i++) {
        hy_options o = {.untied = 1};
        char missing[64];
        uint8_t *bytes = read_bytes("a.st", &size);
        CHECK(rename_keys(bytes, size, cases[i / 2].key, cases[i / 2].renamed) == 1);
        memset(bytes + sum, '0', 64);
        memcpy(bytes + sum, sha256_of(bytes, size, 0), 64);
        if (i % 2) memcpy(memmem(bytes, size, "\"checksum\"", 10), "\"user.sum\"", 10);
        write_file("b.st", bytes, size);
        snprintf(missing, sizeof missing, "b.st: damaged: key %s is missing", cases[i / 2].key + 1);
        CHECK(hy_saved_open(&file, "b.st") == GT_OK);
        const gt_status status = hy_saved_options(&file, HY_TAKE_ALL, &o);
        if (!CHECK(cases[i / 2].is_needed[i % 2] ? status != GT_OK && error_says(missing)
                                                 : status == GT_OK && !o.untied && o.seq == s->options.seq))
            puts(hy_last_error());
        hy_file_close(&file);
        free(bytes);
    }
    free_sample(s);
}

/* Loading fails if the file is of another model, or of a run with other state or text. */
static void test_mismatched(void) {
    sample *a = new_sample(0), *b = new_sample(1);
    CHECK(hy_save(&a->run, "a.st") == GT_OK);
    CHECK(load("a.st", b) != GT_OK && error_says("has no tensor state.layers.0.rwkv.wkv"));
    b->run.text_sum[0] ^= 1;
    CHECK(load("a.st", b) != GT_OK && error_says("not the text that a.st was trained on"));
    hy_config config = *hy_model_config(b->run.model);
    for (int i = 0; i < 5; i++) {
        hy_model *model;
        hy_file file;
        hy_config other = config;
        if (i == 0) other.hidden = 32, other.heads = 0;
        if (i == 1) other.layers = 2;
        if (i == 2) other.mix = HY_MIX_SCALAR;
        if (i == 3) other.untied = 1;
        if (i == 4) other.ffn = HY_NO_FFN;
        CHECK(hy_model_create(b->cpu, &other, a->text.vocab, 1, 4, 1, &model) == GT_OK);
        CHECK(hy_saved_open(&file, "a.st") == GT_OK);
        CHECK(hy_load_weights(&file, model) != GT_OK && error_says("a.st: does not fit: "));
        hy_file_close(&file);
        hy_model_destroy(model);
    }
    free_sample(a);
    free_sample(b);
}

/* Options that contradict the weights are refused, since they would make a model of another size. */
static void test_wrong_size(void) {
    static const struct {
        int64_t hidden, layers;
        const char *reason;
    } cases[] = {{8192, 1, "tensor embedding has the shape"},
                 {16, 128, "option.layers is 128, but"},
                 {16, 2, "option.layers is 2, but"}};
    sample *s = new_sample(0);
    hy_file file;
    for (int i = 0; i < 3; i++) {
        hy_options o = {.help = 0};
        s->options.hidden = cases[i].hidden;
        s->options.layers = cases[i].layers;
        CHECK(hy_save(&s->run, "a.st") == GT_OK && hy_saved_open(&file, "a.st") == GT_OK);
        CHECK(hy_saved_options(&file, HY_TAKE_ALL, &o) != GT_OK && error_says(cases[i].reason));
        hy_file_close(&file);
    }
    free_sample(s);
}

/* If a weight is not finite, saving fails and keeps the older file. */
static void test_not_finite(void) {
    sample *s = new_sample(0);
    int count;
    size_t size, size2;
    CHECK(hy_save(&s->run, "a.st") == GT_OK);
    uint8_t *before = read_bytes("a.st", &size);
    hy_tensor *list = hy_model_tensors(s->run.model, &count);
    double *x = calloc((size_t)list[3].count, sizeof *x);
    x[list[3].count - 1] = NAN;
    CHECK(hy_model_write_tensor(s->run.model, list + 3, x) == GT_OK);
    CHECK(hy_save(&s->run, "a.st") != GT_OK && error_says("not finite"));
    uint8_t *after = read_bytes("a.st", &size2);
    CHECK(size == size2 && !memcmp(before, after, size) && !exists("a.st.tmp"));
    free(before), free(after), free(list), free(x);
    free_sample(s);
}

/* ---- damaged files ------------------------------------------------------------------------- */

/* Cuts the file short at many lengths.  None of these files may load. */
static void test_truncated(void) {
    sample *s = new_sample(1);
    hy_file file;
    CHECK(hy_save(&s->run, "a.st") == GT_OK && hy_file_open(&file, "a.st") == GT_OK);
    int64_t data = file.data, size = file.size;
    hy_file_close(&file);
    int accepted = 0;
    for (int64_t n = size - 1; n >= 0; n -= n > data + 64 ? size / 64 : n < 16 ? 1 : every) {
        CHECK(truncate("a.st", (off_t)n) == 0);
        accepted += hy_file_open(&file, "a.st") == GT_OK;
        CHECK(strstr(hy_last_error(), n ? "cut short" : "empty"));
        hy_file_close(&file);
    }
    CHECK(accepted == 0);
    free_sample(s);
}

static void put_bytes(const char *path, int64_t place, const void *bytes, size_t count) {
    int file = open(path, O_WRONLY);
    CHECK(file >= 0 && pwrite(file, bytes, count, (off_t)place) == (ssize_t)count);
    close(file);
}

/* Changes one bit of the header or of the data at a time.  None of these files may load. */
static void test_flipped(void) {
    sample *s = new_sample(1);
    hy_file file;
    uint64_t random = 3;
    int accepted = 0, tried = 0;
    size_t size;
    CHECK(hy_save(&s->run, "a.st") == GT_OK && hy_file_open(&file, "a.st") == GT_OK);
    int64_t data = file.data;
    hy_file_close(&file);
    uint8_t *bytes = read_bytes("a.st", &size);
    for (int64_t i = 0; i < (int64_t)size; i += i < 16 ? 1 : (i < data ? 3 : (int64_t)size / 300) * every, tried++) {
        uint8_t other = (uint8_t)(bytes[i] ^ (1 << hy_random(&random) % 8));
        put_bytes("a.st", i, &other, 1);
        if (hy_saved_open(&file, "a.st") == GT_OK && ++accepted < 5)
            printf("  byte %lld: %d for %d\n", (long long)i, other, bytes[i]);
        hy_file_close(&file);
        put_bytes("a.st", i, bytes + i, 1);
    }
    CHECK(accepted == 0 && hy_saved_open(&file, "a.st") == GT_OK);
    printf("  %d changes\n", tried);
    hy_file_close(&file);
    free(bytes);
    free_sample(s);
}

/* Makes such changes in the header, and then corrects or removes the checksum.  The file may then load with wrong
 * contents, but loading must not access invalid memory. */
static void test_flipped_unseen(void) {
    static const char key[] = "\"checksum\":\"sha256:", other_key[] = "\"user.sum\":\"sha256:";
    sample *s = new_sample(1);
    uint64_t random = 4;
    size_t size;
    int loaded = 0, tried = 0;
    hy_file file;
    CHECK(hy_save(&s->run, "a.st") == GT_OK && hy_file_open(&file, "a.st") == GT_OK);
    int64_t data = file.data, at = 8 + file.checksum_at;
    hy_file_close(&file);
    uint8_t *bytes = read_bytes("a.st", &size);
    CHECK(!memcmp(bytes + at - (int64_t)strlen(key), key, strlen(key)));
    for (int64_t i = 0; i < data; i += i < 16 ? 1 : 5 * every, tried++) {
        uint8_t was = bytes[i];
        memset(bytes + at, '0', 64);
        bytes[i] ^= (uint8_t)(1 << hy_random(&random) % 8);
        memcpy(bytes + at, sha256_of(bytes, size, 0), 64);
        if (tried % 2) memcpy(bytes + at - (int64_t)strlen(key), other_key, strlen(key));
        write_file("b.st", bytes, size);
        hy_options o = {.help = 0};
        uint8_t vocabulary[256];
        int count;
        gt_status status = hy_saved_open(&file, "b.st");
        if (status == GT_OK) status = hy_saved_options(&file, HY_TAKE_STRICTLY, &o);
        if (status == GT_OK) status = hy_saved_vocabulary(&file, vocabulary, &count);
        if (status == GT_OK) status = hy_load_weights(&file, s->run.model);
        if (status == GT_OK) status = hy_load_run(&file, &s->run);
        CHECK(status == GT_OK || strstr(hy_last_error(), "b.st"));
        loaded += status == GT_OK;
        hy_file_close(&file);
        bytes[i] = was;
        memcpy(bytes + at - (int64_t)strlen(key), key, strlen(key));
    }
    printf("  %d changes, of which %d load\n", tried, loaded);
    CHECK(loaded < tried / 2);
    free(bytes);
    free_sample(s);
}

/* A file without a checksum can give weights, but a run cannot be resumed from it. */
static void test_no_checksum(void) {
    static const char key[] = "\"checksum\"";
    sample *s = new_sample(0);
    size_t size;
    hy_file file;
    mark(s->run.model, 1);
    CHECK(hy_save(&s->run, "a.st") == GT_OK);
    uint8_t *bytes = read_bytes("a.st", &size);
    for (size_t i = 0; i < size; i++)
        if (!memcmp(bytes + i, key, strlen(key))) {
            memcpy(bytes + i, "\"user.sum\"", strlen(key));
            break;
        }
    write_file("a.st", bytes, size);
    mark(s->run.model, 2);
    CHECK(load("a.st", s) != GT_OK && error_says("cannot be resumed"));
    CHECK(unmarked(s->run.model, HY_WEIGHT, 2) == 0);
    CHECK(hy_saved_open(&file, "a.st") == GT_OK);
    CHECK(hy_load_weights(&file, s->run.model) == GT_OK);
    CHECK(unmarked(s->run.model, HY_WEIGHT, 1) == 0 && unmarked(s->run.model, HY_MOMENT, 2) == 0);
    hy_file_close(&file);
    free(bytes);
    free_sample(s);
}

/* ---- a disk that fails --------------------------------------------------------------------- */

/* Whether saving fails with this reason and leaves the older file unchanged. */
static int save_fails(sample *s, const char *reason, const uint8_t *older, size_t size) {
    size_t now;
    gt_status status = hy_save(&s->run, "a.st");
    int said = status != GT_OK && error_says(reason);
    uint8_t *bytes = read_bytes("a.st", &now);
    int same = now == size && !memcmp(bytes, older, size);
    free(bytes);
    return said && same && !exists("a.st.tmp");
}

static void test_failing_disk(void) {
    sample *s = new_sample(1);
    size_t size;
    CHECK(hy_save(&s->run, "a.st") == GT_OK);
    uint8_t *older = read_bytes("a.st", &size);
    mark(s->run.model, 3);
    write_calls = 0;
    CHECK(hy_save(&s->run, "b.st") == GT_OK && write_calls > 2);
    for (int calls = write_calls, i = 0; i < calls; i++) {
        write_calls = 0;
        failing_write = i;
        CHECK(save_fails(s, "a.st: cannot be written: No space left", older, size));
    }
    failing_write = FAIL_NEVER;
    fsync_calls = failing_fsync = 0;
    CHECK(save_fails(s, "a.st: cannot be written: Input/output error", older, size));
    failing_fsync = FAIL_NEVER;
    failing_rename = 1;
    CHECK(save_fails(s, "a.st: cannot be replaced: Permission denied", older, size));
    failing_rename = 0;
    /* if the fsync of the folder fails, the new file exists but may not survive a crash */
    fsync_calls = 0;
    failing_fsync = 1;
    CHECK(hy_save(&s->run, "a.st") != GT_OK && error_says("folder cannot be synced: Input/output"));
    failing_fsync = FAIL_NEVER;
    CHECK(load("a.st", s) == GT_OK && !exists("a.st.tmp"));
    CHECK(hy_save(&s->run, "a.st") == GT_OK && load("a.st", s) == GT_OK);
    free(older);
    free_sample(s);
}

/* Paths where a model file cannot be written, or where it would replace another file. */
static void test_wrong_places(void) {
    struct stat about;
    write_string("book.txt", "not to be lost");
    CHECK(hy_save_fits("book.txt", "") != GT_OK && error_says("would replace a file that is not a model file"));
    CHECK(hy_save_fits("no/such/folder.st", "") != GT_OK && error_says("No such file"));
    CHECK(hy_save_fits(".", "") != GT_OK && error_says("not a regular file"));
    CHECK(hy_save_fits("/dev/null", "") != GT_OK && error_says("not a regular file"));
    CHECK(stat("/dev/null", &about) == 0 && S_ISCHR(about.st_mode));
    CHECK(hy_save_fits("new.st", "") == GT_OK && !exists("new.st") && !exists("new.st.tmp"));
    CHECK(mkdir("new.st.tmp", 0700) == 0 && hy_save_fits("new.st", "") != GT_OK);
    rmdir("new.st.tmp");
    write_string("new.st.tmp", "notes of somebody who has files of this name, too, for his own use");
    CHECK(hy_save_fits("new.st", "") != GT_OK && error_says("its temporary file, new.st.tmp,"));
    char *notes = read_string("new.st.tmp");
    CHECK(!strncmp(notes, "notes of", 8));
    free(notes);
    CHECK(symlink("nowhere/x.st", "link.st") == 0 && hy_save_fits("link.st", "") != GT_OK);
}

/* Saving through a symbolic link keeps the link and the file's access rights.  A run replaces the temporary file that a
 * killed program has left.  Two programs cannot write one file at the same time. */
static void test_older_file(void) {
    sample *s = new_sample(0);
    struct stat about;
    CHECK(mkdir("far", 0700) == 0 && hy_save(&s->run, "far/a.st") == GT_OK);
    CHECK(chmod("far/a.st", 0600) == 0 && symlink("far/a.st", "near.st") == 0);
    mark(s->run.model, 1);
    size_t size;
    uint8_t *left_over = read_bytes("far/a.st", &size);
    write_file("far/a.st.tmp", left_over, 1000);
    free(left_over);
    CHECK(hy_save_fits("near.st", "") == GT_OK && hy_save(&s->run, "near.st") == GT_OK);
    CHECK(lstat("near.st", &about) == 0 && S_ISLNK(about.st_mode));
    CHECK(stat("far/a.st", &about) == 0 && (about.st_mode & 0777) == 0600);
    CHECK(!exists("far/a.st.tmp") && load("far/a.st", s) == GT_OK);
    CHECK(unmarked(s->run.model, HY_WEIGHT, 1) == 0);
    int other = open("far/a.st.tmp", O_RDWR | O_CREAT, 0600);
    CHECK(flock(other, LOCK_EX) == 0);
    CHECK(hy_save(&s->run, "far/a.st") != GT_OK && error_says("another program is writing it"));
    CHECK(exists("far/a.st.tmp") && load("far/a.st", s) == GT_OK);
    close(other);
    CHECK(hy_save(&s->run, "far/a.st") == GT_OK);
    free_sample(s);
}

/* ---- generating ---------------------------------------------------------------------------- */

static void test_draw(void) {
    static const double logits[5] = {1, 3, 2, 3, -1};
    uint64_t random = 1;
    enum { DRAWS = 20000 };
    for (int k = 0; k <= 5; k++) {
        int count[5] = {0};
        double sum = 0, expected[5] = {0};
        for (int i = 0; i < DRAWS; i++) count[hy_draw(logits, 5, 0.7, k, 1, &random)]++;
        static const int order[5] = {1, 3, 2, 0, 4}; /* tokens with equal logits keep their order */
        for (int i = 0; i < (k ? k : 5); i++) sum += expected[order[i]] = exp(logits[order[i]] / 0.7);
        for (int v = 0; v < 5; v++) {
            double p = expected[v] / sum, sigma = sqrt(p * (1 - p) / DRAWS);
            CHECK(fabs((double)count[v] / DRAWS - p) <= 5 * sigma);
        }
    }
    CHECK(hy_draw(logits, 5, 0, 0, 1, &random) == 1);
    /* the probabilities at temperature 1 are 0.404, 0.404, 0.149, 0.055 and slightly less than 0.007 */
    static const struct {
        double top_p;
        int top_k, kept; /* bit v is set if token v can be drawn */
    } tops[] = {{0.3, 0, 2}, {0.5, 0, 10}, {0.9, 0, 14}, {0.97, 0, 15},
                {1, 0, 31},  {0.9, 2, 10}, {0.4, 2, 2},  {1e-6, 0, 2}};
    for (size_t i = 0; i < sizeof tops / sizeof tops[0]; i++) {
        int seen = 0;
        for (int n = 0; n < DRAWS; n++) seen |= 1 << hy_draw(logits, 5, 1, tops[i].top_k, tops[i].top_p, &random);
        if (!CHECK(seen == tops[i].kept)) printf("  top-p %g, top-k %d: %d\n", tops[i].top_p, tops[i].top_k, seen);
    }
}

static int printed_as(const char *bytes, size_t size, const char *text) {
    hy_printer printer = {.out = fopen("printed", "w")};
    for (size_t i = 0; i < size; i++) CHECK(hy_print_byte(&printer, (uint8_t)bytes[i]) == GT_OK);
    hy_print_rest(&printer);
    fclose(printer.out);
    char *got = read_string("printed");
    int same = !strcmp(got, text);
    if (!same) printf("  '%s' for '%s'\n", got, text);
    free(got);
    return same;
}

static void test_printed(void) {
    CHECK(printed_as("plain\ttext\n", 11, "plain\ttext\n"));
    CHECK(printed_as("\x1b[1m\0\x7f", 6, "\\x1b[1m\\x00\\x7f"));
    CHECK(printed_as("h\xc3\xa9 \xe2\x82\xac \xf0\x9f\xa6\x8a", 12, "h\xc3\xa9 \xe2\x82\xac \xf0\x9f\xa6\x8a"));
    CHECK(printed_as("\xe2\x82 a\xe2\xc3\xa9", 7, "\\xe2\\x82 a\\xe2\xc3\xa9"));
    CHECK(printed_as("\xc0\x80\xed\xa0\x80\xe0\x80\x80\xf5\xc2\x85", 11,
                     "\\xc0\\x80\\xed\\xa0\\x80\\xe0\\x80\\x80\\xf5\\xc2\\x85"));
    CHECK(printed_as("a\xf0\x9f", 3, "a\\xf0\\x9f"));
}

/* A backend that counts the work of the CPU backend: multiplications in matrix products, and 1000 for each token of a
 * recurrence. */
static hy_backend *counted_cpu;
static int64_t work;

static gt_status count_gemm(hy_backend *be, const hy_gemm_args *a) {
    (void)be;
    work += a->M * a->N * a->K * (a->count ? a->count : 1);
    return counted_cpu->gemm(counted_cpu, a);
}
static gt_status count_wkv6(hy_backend *be, const gt_wkv6_args *a) {
    (void)be;
    work += a->B * a->T * 1000;
    return counted_cpu->wkv6_forward(counted_cpu, a);
}
static gt_status count_wkv6_step(hy_backend *be, const gt_wkv6_args *a) {
    (void)be;
    work += a->B * (a->T ? a->T : 1) * 1000;
    return counted_cpu->wkv6_step(counted_cpu, a);
}
static gt_status count_ssd(hy_backend *be, const gt_ssd_args *a) {
    (void)be;
    work += a->B * a->T * 1000;
    return counted_cpu->ssd_forward(counted_cpu, a);
}
static gt_status count_ssd_step(hy_backend *be, const gt_ssd_args *a) {
    (void)be;
    work += a->B * (a->T ? a->T : 1) * 1000;
    return counted_cpu->ssd_step(counted_cpu, a);
}

static int64_t work_of(hy_model *model, const hy_text *text, int64_t count) {
    hy_printer printer = {.out = fopen("printed", "w"), .raw = 1};
    const hy_sampling sampling = {.prompt = "the quick", .count = count, .temperature = 1};
    work = 0;
    CHECK(hy_generate(model, text, &sampling, &printer, NULL) == GT_OK);
    fclose(printer.out);
    return work;
}

/* Each further byte that the model generates costs the same work. */
static void test_cost(void) {
    sample *s = new_sample(0);
    hy_model *model;
    counted_cpu = s->cpu;
    hy_backend counting = *s->cpu;
    counting.gemm = count_gemm;
    counting.wkv6_forward = count_wkv6, counting.wkv6_step = count_wkv6_step;
    counting.ssd_forward = count_ssd, counting.ssd_step = count_ssd_step;
    CHECK(hy_model_create(&counting, hy_model_config(s->run.model), s->text.vocab, 1, 8, 5, &model) == GT_OK);
    int64_t five = work_of(model, &s->text, 5), fifty = work_of(model, &s->text, 50);
    int64_t thousand = work_of(model, &s->text, 1000);
    CHECK(five > 0 && (fifty - five) % 45 == 0);
    CHECK((thousand - fifty) * 45 == (fifty - five) * 950);
    hy_model_destroy(model);
    free_sample(s);
}

int main(int argc, char **argv) {
    every = argc > 1 && !strcmp(argv[1], "short") ? 29 : 1;
    int status = begin_tests(argv[0]);
    if (status) return status;
    run_case("SHA-256", test_sha256);
    run_case("format: round trip", test_round_trip);
    run_case("format: forms", test_forms);
    run_case("format: refused headers", test_refused_headers);
    run_case("model files: all of a run", test_saved);
    run_case("model files: options", test_saved_options);
    run_case("model files: format 1", test_older_format);
    run_case("model files: damaged options", test_damaged_options);
    run_case("model files: missing options", test_missing_options);
    run_case("model files: mismatched", test_mismatched);
    run_case("model files: wrong size", test_wrong_size);
    run_case("model files: not finite", test_not_finite);
    run_case("damage: every length", test_truncated);
    run_case("damage: changed bytes", test_flipped);
    run_case("damage: changed bytes, no checksum", test_flipped_unseen);
    run_case("damage: without checksum", test_no_checksum);
    run_case("disk: failing writes", test_failing_disk);
    run_case("disk: wrong places", test_wrong_places);
    run_case("disk: older file", test_older_file);
    run_case("text: drawing", test_draw);
    run_case("text: printing", test_printed);
    run_case("text: cost per byte", test_cost);
    return end_tests();
}
