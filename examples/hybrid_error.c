/* Stores the text of the last error, separately for each thread. */
#include "hybrid_ops.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char hy_error_text[640];

gt_status hy_fail(gt_status status, const char *format, ...) {
    char text[sizeof hy_error_text]; /* a copy, since an argument may be the last error itself */
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    memcpy(hy_error_text, text, sizeof text);
    return status;
}

const char *hy_last_error(void) { return hy_error_text; }
