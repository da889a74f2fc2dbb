#include "hybrid_limit.h"
#include <ctype.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATH_ROOM = 4096 };

/* Reads the number in a file.  Returns 0 if there is no number, for example if the file says "max". */
static size_t number_in(const char *path) {
    char text[64] = "", *end;
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    if (!isdigit((unsigned char)*text)) return 0;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    if (errno || number > SIZE_MAX || (*end && *end != '\n')) return 0;
    return (size_t)number;
}

/* Finds the smallest limit of a group and its parents, up to the folder of the hierarchy.  It skips missing files,
 * because a container may know the path of its group without seeing the folders of that path. */
static size_t least_above(const char *hierarchy, const char *group, const char *file) {
    char path[PATH_ROOM], full[PATH_ROOM + 64];
    size_t least = 0;
    if (strstr(group, "/..")) group = ""; /* the group lies outside of the container's view */
    int length = snprintf(path, sizeof path, "%s%s", hierarchy, group);
    if (length < 0 || length >= (int)sizeof path) return 0;
    for (size_t top = strlen(hierarchy);;) {
        snprintf(full, sizeof full, "%s/%s", path, file);
        size_t limit = number_in(full);
        if (limit && (!least || limit < least)) least = limit;
        if (strlen(path) <= top) return least;
        *strrchr(path, '/') = 0;
    }
}

/* Returns whether a comma-separated list contains the word. */
static int has_word(const char *list, const char *word) {
    const size_t length = strlen(word);
    for (const char *at = list; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL)
        if (!strncmp(at, word, length) && (!at[length] || at[length] == ',')) return 1;
    return 0;
}

/* Finds the limit that a line of /proc/self/cgroup leads to.  The line is HIERARCHY:CONTROLLERS:GROUP, or 0::GROUP
 * for control groups of version 2. */
static size_t limit_of_line(const char *root, char *line) {
    char hierarchy[PATH_ROOM];
    char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!group) return 0;
    *group++ = 0, controllers++;
    group[strcspn(group, "\n")] = 0;
    const int is_second = !*controllers;
    if (!is_second && !has_word(controllers, "memory")) return 0;
    int length = snprintf(hierarchy, sizeof hierarchy, "%s/sys/fs/cgroup%s", root, is_second ? "" : "/memory");
    if (length < 0 || length >= (int)sizeof hierarchy) return 0;
    return least_above(hierarchy, group, is_second ? "memory.max" : "memory.limit_in_bytes");
}

size_t hy_memory_limit(const char *root) {
    char path[PATH_ROOM], line[PATH_ROOM];
    size_t least = 0;
    int length = snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    FILE *file = length > 0 && length < (int)sizeof path ? fopen(path, "r") : NULL;
    while (file && fgets(line, sizeof line, file)) {
        size_t limit = limit_of_line(root, line);
        if (limit && (!least || limit < least)) least = limit;
    }
    if (file) fclose(file);
    return least;
}
