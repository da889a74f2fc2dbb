/* gt/xla/api.h - the part of XLA's foreign function interface that the handlers need (plain C).  It is declared here,
 * so that a build needs no files of XLA.  The names are our own.  The layout matches XLA_FFI_... in
 * xla/ffi/api/c_api.h, version 0.1; tests/xla/offsets.c compares the two.
 *
 * XLA adds fields at the end of a struct without a change of struct_size or version.  So no handler reads struct_size,
 * and none writes a field that version 0.1 lacks.  Calls are the same in 0.1 to 0.4.  Registration differs: 0.4 has one
 * more stage, and its error_message also writes the error's code. */
#ifndef GT_XLA_API_H
#define GT_XLA_API_H

#include <stddef.h>
#include <stdint.h>

#define GT_XLA_MAJOR 0
#define GT_XLA_MINOR 1

/* XLA_FFI_Extension_Type, _DataType, _AttrType, _ExecutionStage, _Handler_TraitsBits, _Error_Code */
enum { GT_XLA_METADATA = 1, GT_XLA_BUFFER = 1, GT_XLA_SCALAR = 3, GT_XLA_STRING = 4, GT_XLA_EXECUTE = 3 };
enum {
    GT_XLA_PRED = 1,
    GT_XLA_S8 = 2,
    GT_XLA_S16 = 3,
    GT_XLA_S32 = 4,
    GT_XLA_S64 = 5,
    GT_XLA_U8 = 6,
    GT_XLA_U16 = 7,
    GT_XLA_U32 = 8,
    GT_XLA_F16 = 10,
    GT_XLA_F32 = 11,
    GT_XLA_F64 = 12,
    GT_XLA_BF16 = 16
};
enum { GT_XLA_COMMAND_BUFFERS = 1 }; /* a trait: a graph may capture calls and replay them */
enum { GT_XLA_INVALID_ARGUMENT = 3, GT_XLA_RESOURCE_EXHAUSTED = 8, GT_XLA_UNIMPLEMENTED = 12, GT_XLA_INTERNAL = 13 };

typedef struct gt_xla_extension { /* XLA_FFI_Extension_Base */
    size_t struct_size;
    int type;
    struct gt_xla_extension *next;
} gt_xla_extension;

typedef struct gt_xla_version { /* XLA_FFI_Api_Version */
    size_t struct_size;
    gt_xla_extension *extensions;
    int major, minor;
} gt_xla_version;

typedef struct gt_xla_metadata { /* XLA_FFI_Metadata; later versions have more fields */
    size_t struct_size;
    gt_xla_version version;
    uint32_t traits;
} gt_xla_metadata;

typedef struct gt_xla_metadata_query { /* XLA_FFI_Metadata_Extension */
    gt_xla_extension base;
    gt_xla_metadata *metadata;
} gt_xla_metadata_query;

typedef struct gt_xla_text { /* XLA_FFI_ByteSpan: not terminated by 0 */
    const char *data;
    size_t size;
} gt_xla_text;

typedef struct gt_xla_scalar { /* XLA_FFI_Scalar */
    int dtype;
    void *value;
} gt_xla_scalar;

typedef struct gt_xla_buffer { /* XLA_FFI_Buffer */
    size_t struct_size;
    gt_xla_extension *extensions;
    int dtype;
    void *data;
    int64_t rank;
    int64_t *sizes;
} gt_xla_buffer;

typedef struct gt_xla_buffers { /* XLA_FFI_Args and XLA_FFI_Rets */
    size_t struct_size;
    gt_xla_extension *extensions;
    int64_t count;
    int *types;
    void **buffers; /* each is a gt_xla_buffer, if its type is GT_XLA_BUFFER */
} gt_xla_buffers;

typedef struct gt_xla_attributes { /* XLA_FFI_Attrs */
    size_t struct_size;
    gt_xla_extension *extensions;
    int64_t count;
    int *types;
    gt_xla_text **names;
    void **values; /* each is a gt_xla_scalar or gt_xla_text, as its type says */
} gt_xla_attributes;

typedef struct gt_xla_frame { /* XLA_FFI_CallFrame, without its last field */
    size_t struct_size;
    gt_xla_extension *extensions;
    const struct gt_xla_api *api;
    void *context;
    int stage;
    gt_xla_buffers operands, results;
    gt_xla_attributes attributes;
} gt_xla_frame;

typedef struct gt_xla_error gt_xla_error; /* defined by XLA */
typedef gt_xla_error *gt_xla_call(gt_xla_frame *frame);

typedef struct gt_xla_error_create { /* XLA_FFI_Error_Create_Args */
    size_t struct_size;
    gt_xla_extension *extensions;
    const char *message;
    int code;
} gt_xla_error_create;

typedef struct gt_xla_error_message { /* XLA_FFI_Error_GetMessage_Args, from 0.4 on XLA_FFI_Error_GetDetails_Args */
    size_t struct_size;
    gt_xla_extension *extensions;
    gt_xla_error *error;
    const char *message;
    int code; /* from 0.4 on */
} gt_xla_error_message;

typedef struct gt_xla_error_destroy { /* XLA_FFI_Error_Destroy_Args */
    size_t struct_size;
    gt_xla_extension *extensions;
    gt_xla_error *error;
} gt_xla_error_destroy;

typedef struct gt_xla_handler_register { /* XLA_FFI_Handler_Register_Args */
    size_t struct_size;
    gt_xla_extension *extensions;
    gt_xla_text name, platform;
    gt_xla_call *instantiate, *prepare, *initialize, *execute;
    union {
        uint32_t traits;     /* up to 0.3 */
        gt_xla_call *record; /* from 0.4 on */
    } next;
    uint32_t traits; /* from 0.4 on */
} gt_xla_handler_register;

typedef struct gt_xla_stream_get { /* XLA_FFI_Stream_Get_Args */
    size_t struct_size;
    gt_xla_extension *extensions;
    void *context;
    void *stream;
} gt_xla_stream_get;

typedef struct gt_xla_api { /* XLA_FFI_Api: its first functions, whose order has not changed since 0.1 */
    size_t struct_size;
    gt_xla_extension *extensions;
    gt_xla_version version;
    const void *internal;
    gt_xla_error *(*error_create)(gt_xla_error_create *);
    void (*error_message)(gt_xla_error_message *);
    void (*error_destroy)(gt_xla_error_destroy *);
    gt_xla_error *(*handler_register)(gt_xla_handler_register *);
    gt_xla_error *(*stream_get)(gt_xla_stream_get *);
} gt_xla_api;

/* The size that XLA expects for a struct: up to the end of its last field, without padding. */
#define GT_XLA_SIZE(type, last) (offsetof(type, last) + sizeof(((type *)0)->last))

#endif
