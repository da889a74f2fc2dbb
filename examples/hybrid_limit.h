/* The memory that control groups of Linux leave to this process, in a container for example. */
#ifndef HYBRID_LIMIT_H
#define HYBRID_LIMIT_H

#include <stddef.h>

/* The smallest memory limit, in bytes, of the process's control group and of all groups above it; 0: no limit.  Control
 * groups of version 2 keep it in memory.max, those of version 1 in memory.limit_in_bytes.  root: the folder that holds
 * proc/ and sys/; "" for the machine itself. */
size_t hy_memory_limit(const char *root);

#endif
