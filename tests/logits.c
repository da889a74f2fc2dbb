/* logits MODEL_FILE: reads a text from standard input, and runs a model of hybrid_train on the CPU.  After each byte of
 * the text it prints the model's logits, one line of "%.9g" numbers.  The Python tests compare their model with these
 * lines. */
#include "hybrid_save.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int fail(void) {
    fprintf(stderr, "logits: %s\n", hy_last_error());
    return 1;
}

int main(int argc, char **argv) {
    char *const none[] = {argv[0], NULL};
    hy_file file = {0};
    hy_options options = {0};
    hy_backend *cpu;
    hy_model *model;
    hy_text text = {0};
    uint8_t bytes[256];
    int count;
    if (argc != 2) return fprintf(stderr, "logits MODEL_FILE <TEXT\n"), 2;
    if (hy_options_parse(&options, 1, none) != GT_OK || hy_saved_open(&file, argv[1]) != GT_OK ||
        hy_saved_options(&file, HY_TAKE_ALL, &options) != GT_OK || hy_options_default(&options, 0) != GT_OK ||
        hy_saved_vocabulary(&file, bytes, &count) != GT_OK)
        return fail();
    hy_text_vocabulary(&text, bytes, count, 0);
    hy_config config = {0};
    int models;
    const hy_config *list = hy_model_list(&models);
    for (int i = 0; i < models; i++)
        if (!strcmp(list[i].name, options.model)) config = list[i];
    if (!config.name) return fprintf(stderr, "logits: no model %s\n", options.model), 1;
    if (options.hidden) config.hidden = (int)options.hidden, config.heads = 0;
    if (options.layers) config.layers = (int)options.layers;
    if (hy_backend_cpu(&cpu) != GT_OK || hy_model_create(cpu, &config, count, 1, 1, 1, &model) != GT_OK ||
        hy_load_weights(&file, model) != GT_OK || hy_model_reset(model) != GT_OK)
        return fail();
    double *logits = malloc((size_t)count * sizeof *logits);
    if (!logits) return 1;
    for (int byte; (byte = getchar()) != EOF;) {
        const int32_t token = text.token_of[byte];
        if (token < 0) return fprintf(stderr, "logits: byte %d is not in the vocabulary\n", byte), 1;
        if (hy_model_feed(model, &token, 1, logits) != GT_OK) return fail();
        for (int i = 0; i < count; i++) printf("%.9g%c", logits[i], i + 1 < count ? ' ' : '\n');
    }
    free(logits);
    hy_model_destroy(model);
    hy_file_close(&file);
    return fflush(stdout) || ferror(stdout);
}
