/* SHA-256, as FIPS 180-4 defines it.  The trainer uses it for the checksum of model files, and to tell whether two
 * texts are equal. */
#ifndef HYBRID_SHA256_H
#define HYBRID_SHA256_H

#include <stddef.h>
#include <stdint.h>

typedef struct hy_sha256 {
    uint32_t hash[8];
    uint64_t bytes;    /* bytes added so far */
    uint8_t block[64]; /* the last bytes % 64 bytes, which do not fill a block yet */
} hy_sha256;

void hy_sha256_start(hy_sha256 *s);
void hy_sha256_add(hy_sha256 *s, const void *bytes, size_t count);

/* Writes the digest as 64 hexadecimal digits.  s cannot be used afterwards. */
void hy_sha256_end(hy_sha256 *s, char hex[65]);

#endif
