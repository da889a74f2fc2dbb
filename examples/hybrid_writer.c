/* Writes safetensors files. */
#define _DEFAULT_SOURCE /* flock, realpath */
#include "hybrid_file.h"
#include "hybrid_sha256.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        gt_status status_ = (call);                                                                                    \
        if (status_ != GT_OK) return status_;                                                                          \
    } while (0)

enum { DIGITS = 64, ROOM = 1 << 16 };
static const char first_text[] = "{\"__metadata__\":{\"checksum\":\"sha256:"; /* every header starts with this text */

struct hy_file_writer {
    char *path, *beside; /* path: the final name; beside: the file PATH.tmp, which the writer writes */
    int file;            /* descriptor of the file `beside`; -1: not open */
    int is_new;          /* 1: the writer has created the file `beside` */
    mode_t mode;
    int replaces;          /* 1: a file with this mode exists at `path`, and the new file will replace it */
    char *texts, *tensors; /* JSON of the metadata and of the tensors */
    int64_t data, written; /* bytes of data: all tensors together; written so far */
    int64_t checksum_at;   /* offset of the checksum's digits in the file */
    hy_sha256 sum;
    char buffer[ROOM];
    size_t used; /* bytes used in the buffer */
};

static gt_status fail_writing(const hy_file_writer *w, const char *what) {
    return hy_fail(GT_ERROR_VALUE, "%s: %s: %s", w->path, what, strerror(errno));
}

static gt_status no_memory(const hy_file_writer *w) {
    return hy_fail(GT_ERROR_MEMORY, "%s: no memory to write it", w->path);
}

/* ---- opening ------------------------------------------------------------------------------- */

/* Sets the final name.  It is the path itself, or the file that a link leads to, so that the link stays. */
static gt_status find_place(hy_file_writer *w, const char *path) {
    struct stat about;
    if (stat(path, &about) == 0) {
        if (!S_ISREG(about.st_mode)) return hy_fail(GT_ERROR_VALUE, "%s: not a regular file", path);
        if (access(path, W_OK)) return hy_fail(GT_ERROR_VALUE, "%s: cannot be written: %s", path, strerror(errno));
        w->mode = about.st_mode & 0777;
        w->replaces = 1;
        w->path = realpath(path, NULL);
    } else if (lstat(path, &about) == 0) {
        return hy_fail(GT_ERROR_VALUE, "%s: a link to a file that does not exist", path);
    } else {
        w->path = strdup(path);
    }
    if (!w->path) return hy_fail(GT_ERROR_MEMORY, "%s: no memory to write it", path);
    w->beside = malloc(strlen(w->path) + 5);
    if (!w->beside) return no_memory(w);
    strcpy(w->beside, w->path);
    strcat(w->beside, ".tmp");
    return GT_OK;
}

/* Returns whether PATH.tmp may be left over from a killed program or a loss of power.  Such a file is empty, or
 * begins with zeros or with the start of our header. */
static int is_left_over(int file) {
    static const char nothing[8 + sizeof first_text - 1];
    char bytes[sizeof nothing];
    ssize_t n = pread(file, bytes, sizeof bytes, 0);
    if (n == 0) return 1;
    return n == (ssize_t)sizeof bytes &&
           (!memcmp(bytes + 8, first_text, sizeof bytes - 8) || !memcmp(bytes, nothing, sizeof bytes));
}

/* Opens PATH.tmp and locks it, without changing it.  Takes over a PATH.tmp that a killed program has left.  Fails if
 * another program is writing it.  *again is 1 if PATH.tmp was renamed or removed before this program had the lock. */
static gt_status open_beside(hy_file_writer *w, int *again) {
    const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW;
    struct stat ours, there;
    *again = 0;
    w->is_new = 0;
    w->file = open(w->beside, flags);
    if (w->file < 0 && errno == ENOENT) {
        w->file = open(w->beside, flags | O_CREAT | O_EXCL, w->mode);
        w->is_new = w->file >= 0;
        if ((*again = w->file < 0 && errno == EEXIST)) return GT_OK;
    }
    if (w->file < 0 && !lstat(w->beside, &there))
        return hy_fail(
            GT_ERROR_VALUE,
            "%s: its temporary file, %s.tmp, exists and cannot be opened (%s); remove it or give another name", w->path,
            w->path, strerror(errno));
    if (w->file < 0) return fail_writing(w, "cannot be written");
    if (flock(w->file, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK)
        return hy_fail(GT_ERROR_VALUE, "%s: another program is writing it", w->path);
    if (fstat(w->file, &ours)) return fail_writing(w, "cannot be written");
    if (!S_ISREG(ours.st_mode)) return hy_fail(GT_ERROR_VALUE, "%s: not a regular file", w->beside);
    if (stat(w->beside, &there) || ours.st_ino != there.st_ino || ours.st_dev != there.st_dev) {
        close(w->file);
        w->file = -1;
        *again = 1;
    } else if (!is_left_over(w->file)) {
        return hy_fail(GT_ERROR_VALUE, "%s: its temporary file, %s.tmp, already exists; remove it or give another name",
                       w->path, w->path);
    }
    return GT_OK;
}

static gt_status open_writer(hy_file_writer *w, const char *path) {
    int again = 1;
    TRY(find_place(w, path));
    for (int i = 0; again && i < 100; i++) TRY(open_beside(w, &again));
    return again ? hy_fail(GT_ERROR_VALUE, "%s: another program is writing it", path) : GT_OK;
}

static void free_writer(hy_file_writer *w) {
    if (w->file >= 0) close(w->file);
    free(w->path);
    free(w->beside);
    free(w->texts);
    free(w->tensors);
    free(w);
}

/* Makes a writer, without changing PATH.tmp. */
static gt_status new_writer(hy_file_writer **writer, const char *path) {
    hy_file_writer *w = calloc(1, sizeof *w);
    *writer = NULL;
    if (!w) return hy_fail(GT_ERROR_MEMORY, "%s: no memory to write it", path);
    w->file = -1;
    w->mode = 0666;
    gt_status status = open_writer(w, path);
    if (status != GT_OK) {
        free_writer(w);
        return status;
    }
    *writer = w;
    return GT_OK;
}

gt_status hy_writer_open(hy_file_writer **writer, const char *path) {
    TRY(new_writer(writer, path));
    hy_file_writer *w = *writer;
    int keeps_mode = w->is_new || !w->replaces || !fchmod(w->file, w->mode);
    if (keeps_mode && !ftruncate(w->file, 0)) return GT_OK;
    gt_status status = fail_writing(w, "cannot be written");
    free_writer(w);
    *writer = NULL;
    return status;
}

gt_status hy_writer_fits(const char *path, const char *reads) {
    hy_file_writer *w;
    struct stat ours, other;
    TRY(new_writer(&w, path));
    gt_status status = GT_OK;
    if (*reads && !fstat(w->file, &ours) && !stat(reads, &other) && ours.st_ino == other.st_ino &&
        ours.st_dev == other.st_dev)
        status =
            hy_fail(GT_ERROR_VALUE, "%s: its temporary file, %s.tmp, is the model file that is read; give another name",
                    w->path, w->path);
    if (w->is_new) unlink(w->beside);
    free_writer(w);
    return status;
}

/* ---- the header ---------------------------------------------------------------------------- */

/* Appends `more` to *text, which it reallocates; *text = NULL stands for "". */
static gt_status append(const hy_file_writer *w, char **text, const char *more) {
    size_t n = *text ? strlen(*text) : 0, m = strlen(more);
    char *larger = realloc(*text, n + m + 1);
    if (!larger) return no_memory(w);
    memcpy(larger + n, more, m + 1);
    *text = larger;
    return GT_OK;
}

/* Appends a string in quotes. */
static gt_status append_quoted(const hy_file_writer *w, char **text, const char *more) {
    char *quoted = malloc(6 * strlen(more) + 3), *to = quoted;
    if (!quoted) return no_memory(w);
    *to++ = '"';
    for (; *more; more++) {
        if (*more == '"' || *more == '\\') *to++ = '\\';
        if ((unsigned char)*more < 32 || *more == 127)
            to += sprintf(to, "\\u%04x", (unsigned)*more);
        else
            *to++ = *more;
    }
    *to++ = '"';
    *to = 0;
    gt_status status = append(w, text, quoted);
    free(quoted);
    return status;
}

gt_status hy_writer_text(hy_file_writer *w, const char *key, const char *value) {
    if (w->texts) TRY(append(w, &w->texts, ","));
    TRY(append_quoted(w, &w->texts, key));
    TRY(append(w, &w->texts, ":"));
    return append_quoted(w, &w->texts, value);
}

gt_status hy_writer_tensor(hy_file_writer *w, const char *name, hy_file_dtype dtype, int rank, const int64_t *shape) {
    char text[64];
    int64_t bytes = dtype == HY_FILE_F32 ? 4 : 8;
    TRY(append(w, &w->tensors, ","));
    TRY(append_quoted(w, &w->tensors, name));
    TRY(append(w, &w->tensors,
               dtype == HY_FILE_F32 ? ":{\"dtype\":\"F32\",\"shape\":[" : ":{\"dtype\":\"I64\",\"shape\":["));
    for (int i = 0; i < rank; i++) {
        snprintf(text, sizeof text, "%s%lld", i ? "," : "", (long long)shape[i]);
        TRY(append(w, &w->tensors, text));
        bytes *= shape[i];
    }
    snprintf(text, sizeof text, "],\"data_offsets\":[%lld,%lld]}", (long long)w->data, (long long)(w->data + bytes));
    w->data += bytes;
    return append(w, &w->tensors, text);
}

/* ---- the file ------------------------------------------------------------------------------ */

static gt_status write_all(hy_file_writer *w, const char *bytes, size_t count) {
    while (count) {
        ssize_t n = write(w->file, bytes, count);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return fail_writing(w, "cannot be written");
        bytes += n, count -= (size_t)n;
    }
    return GT_OK;
}

static gt_status flush(hy_file_writer *w) {
    TRY(write_all(w, w->buffer, w->used));
    w->used = 0;
    return GT_OK;
}

static gt_status put(hy_file_writer *w, const void *bytes, size_t count) {
    const char *from = bytes;
    hy_sha256_add(&w->sum, bytes, count);
    while (count) {
        size_t n = ROOM - w->used < count ? ROOM - w->used : count;
        memcpy(w->buffer + w->used, from, n);
        w->used += n, from += n, count -= n;
        if (w->used == ROOM) TRY(flush(w));
    }
    return GT_OK;
}

static gt_status put_header(hy_file_writer *w, const char *header) {
    static const char spaces[] = "       ";
    size_t n = strlen(header), padded = (n + 7) / 8 * 8;
    uint8_t length[8];
    for (int i = 0; i < 8; i++) length[i] = (uint8_t)((uint64_t)padded >> 8 * i);
    TRY(put(w, length, 8));
    TRY(put(w, header, n));
    return put(w, spaces, padded - n);
}

gt_status hy_writer_begin(hy_file_writer *w) {
    char *header = NULL, digits[DIGITS + 1];
    memset(digits, '0', DIGITS);
    digits[DIGITS] = 0;
    w->checksum_at = 8 + (int64_t)strlen(first_text);
    hy_sha256_start(&w->sum);
    gt_status status = append(w, &header, first_text);
    if (status == GT_OK) status = append(w, &header, digits);
    if (status == GT_OK) status = append(w, &header, w->texts ? "\"," : "\"");
    if (status == GT_OK && w->texts) status = append(w, &header, w->texts);
    if (status == GT_OK) status = append(w, &header, "}");
    if (status == GT_OK && w->tensors) status = append(w, &header, w->tensors);
    if (status == GT_OK) status = append(w, &header, "}");
    if (status == GT_OK) status = put_header(w, header);
    free(header);
    return status;
}

gt_status hy_writer_data(hy_file_writer *w, const void *bytes, size_t count) {
    w->written += (int64_t)count;
    return put(w, bytes, count);
}

/* Writes the digits of the checksum into the file, over the zeros in their place. */
static gt_status put_checksum(hy_file_writer *w) {
    char hex[DIGITS + 1];
    TRY(flush(w));
    hy_sha256_end(&w->sum, hex);
    if (lseek(w->file, (off_t)w->checksum_at, SEEK_SET) < 0) return fail_writing(w, "cannot be written");
    return write_all(w, hex, DIGITS);
}

/* Syncs the folder, so that the rename survives a loss of power. */
static gt_status sync_folder(const hy_file_writer *w) {
    char *folder = strdup(w->path);
    if (!folder) return no_memory(w);
    char *slash = strrchr(folder, '/');
    if (slash) slash[slash == folder] = 0;
    int file = open(slash ? folder : ".", O_RDONLY | O_CLOEXEC);
    int bad = file < 0 || (fsync(file) && errno != EINVAL); /* EINVAL: this system does not sync folders */
    int error = errno;
    if (file >= 0) close(file);
    free(folder);
    errno = error;
    return bad ? fail_writing(w, "written, but its folder cannot be synced") : GT_OK;
}

static gt_status put_in_place(hy_file_writer *w) {
    if (w->written != w->data)
        return hy_fail(GT_ERROR_VALUE, "%s: only %lld of %lld bytes were written", w->path, (long long)w->written,
                       (long long)w->data);
    TRY(put_checksum(w));
    if (fsync(w->file)) return fail_writing(w, "cannot be written");
    if (rename(w->beside, w->path)) return fail_writing(w, "cannot be replaced");
    w->beside[0] = 0;
    TRY(sync_folder(w));
    int file = w->file;
    w->file = -1;
    return close(file) ? fail_writing(w, "cannot be written") : GT_OK;
}

gt_status hy_writer_end(hy_file_writer *w, gt_status status) {
    if (status == GT_OK) status = put_in_place(w);
    if (w->beside[0]) unlink(w->beside);
    free_writer(w);
    return status;
}
