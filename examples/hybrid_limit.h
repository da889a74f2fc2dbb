/* The memory limit of the Linux control groups of this process.  A container sets such a limit, for example. */
#ifndef HYBRID_LIMIT_H
#define HYBRID_LIMIT_H

#include <stddef.h>

/* Returns the smallest memory limit, in bytes, of the process's control group and of all groups above it; 0: no
 * limit.  Control groups of version 2 have the limit in the file memory.max, groups of version 1 in
 * memory.limit_in_bytes.  root is the folder that holds proc/ and sys/; "" means the root of this machine. */
size_t hy_memory_limit(const char *root);

#endif
