/* logits MODEL_FILE runs a model of hybrid_train on the CPU, on a text from standard input.  If the model was trained
 * on numbers, the input is little-endian 16-bit numbers.  After each token the program prints the model's logits as one
 * line of "%.9g" numbers.  The Python tests compare their model with these lines. */
#include "hybrid_save.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int fail(void) {
    fprintf(stderr, "logits: %s\n", hy_last_error());
    return 1;
}

/* The next token of standard input.  -1: the input has ended; -2: a byte is not in the vocabulary. */
static int32_t next_token(const hy_text *text) {
    const int byte = getchar();
    if (byte == EOF) return -1;
    if (text->is_numbers) return byte | getchar() << 8;
    if (text->token_of[byte] >= 0) return text->token_of[byte];
    fprintf(stderr, "logits: byte %d is not in the vocabulary\n", byte);
    return -2;
}

int main(int argc, char **argv) {
    char *const none[] = {argv[0], NULL};
    hy_file file = {0};
    hy_options options = {0};
    hy_config config = {0};
    hy_backend *cpu;
    hy_model *model;
    hy_text text = {0};
    uint8_t bytes[256];
    int count;
    int32_t token;
    if (argc != 2) return fprintf(stderr, "logits MODEL_FILE <TEXT\n"), 2;
    if (hy_options_parse(&options, 1, none) != GT_OK || hy_saved_open(&file, argv[1]) != GT_OK ||
        hy_saved_options(&file, HY_TAKE_ALL, &options) != GT_OK || hy_options_default(&options, 0) != GT_OK ||
        hy_options_config(&options, &config) != GT_OK || hy_saved_numbers(&file, &count) != GT_OK)
        return fail();
    text.is_numbers = count > 0;
    if (!text.is_numbers) {
        if (hy_saved_vocabulary(&file, bytes, &count) != GT_OK) return fail();
        hy_text_vocabulary(&text, bytes, count, options.end_symbol);
        count = text.vocab;
    }
    if (hy_backend_cpu(&cpu) != GT_OK || hy_model_create(cpu, &config, count, 1, 1, 1, &model) != GT_OK ||
        hy_load_weights(&file, model) != GT_OK || hy_model_reset(model) != GT_OK)
        return fail();
    double *logits = malloc((size_t)count * sizeof *logits);
    if (!logits) return 1;
    while ((token = next_token(&text)) >= 0) {
        if (hy_model_feed(model, &token, 1, logits) != GT_OK) return fail();
        for (int i = 0; i < count; i++) printf("%.9g%c", logits[i], i + 1 < count ? ' ' : '\n');
    }
    free(logits);
    hy_model_destroy(model);
    cpu->close(cpu);
    hy_file_close(&file);
    return token == -2 || fflush(stdout) || ferror(stdout);
}
