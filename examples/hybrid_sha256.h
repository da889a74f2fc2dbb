/* SHA-256, FIPS 180-4: what model files are checked with, and what tells whether a text is the
 * same. */
#ifndef HYBRID_SHA256_H
#define HYBRID_SHA256_H

#include <stddef.h>
#include <stdint.h>

typedef struct hy_sha256 {
    uint32_t hash[8];
    uint64_t bytes;    /* so far */
    uint8_t block[64]; /* the last bytes % 64 of them */
} hy_sha256;

void hy_sha256_start(hy_sha256 *s);
void hy_sha256_add(hy_sha256 *s, const void *bytes, size_t count);

/* The digest in 64 hexadecimal digits; s is used up. */
void hy_sha256_end(hy_sha256 *s, char hex[65]);

#endif
