/* offsets.c - compares gt/xla/api.h with XLA's own header, which jaxlib installs.  The test is to compile this file:
 * all fields, sizes and constants that the handlers use must be the same in both headers. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gt/xla/api.h"
#include "xla/ffi/api/c_api.h"

#if XLA_FFI_API_MINOR >= 4
#define EXTENSION XLA_FFI_InternalExtension
#define MESSAGE XLA_FFI_Error_GetDetails
#define MESSAGE_ARGS XLA_FFI_Error_GetDetails_Args
#else
/* the type has two names in versions 0.3 of the header */
#define EXTENSION typeof(*((XLA_FFI_Api *)0)->extension_start)
#define MESSAGE XLA_FFI_Error_GetMessage
#define MESSAGE_ARGS XLA_FFI_Error_GetMessage_Args
#endif

#define SAME(ours, theirs) _Static_assert((ours) == (theirs), #ours " is not " #theirs)
#define FIELD(ours, our_field, theirs, their_field)                                                                    \
    SAME(offsetof(ours, our_field), offsetof(theirs, their_field));                                                    \
    SAME(sizeof(((ours *)0)->our_field), sizeof(((theirs *)0)->their_field))
#define SIZE(ours, last, theirs) SAME((int)GT_XLA_SIZE(ours, last), (int)theirs##_STRUCT_SIZE)

SAME(GT_XLA_METADATA, (int)XLA_FFI_Extension_Metadata);
SAME(GT_XLA_BUFFER, (int)XLA_FFI_ArgType_BUFFER);
SAME(GT_XLA_BUFFER, (int)XLA_FFI_RetType_BUFFER);
SAME(GT_XLA_SCALAR, (int)XLA_FFI_AttrType_SCALAR);
SAME(GT_XLA_STRING, (int)XLA_FFI_AttrType_STRING);
SAME(GT_XLA_EXECUTE, (int)XLA_FFI_ExecutionStage_EXECUTE);
SAME(GT_XLA_PRED, (int)XLA_FFI_DataType_PRED);
SAME(GT_XLA_S8, (int)XLA_FFI_DataType_S8);
SAME(GT_XLA_S16, (int)XLA_FFI_DataType_S16);
SAME(GT_XLA_S32, (int)XLA_FFI_DataType_S32);
SAME(GT_XLA_S64, (int)XLA_FFI_DataType_S64);
SAME(GT_XLA_U8, (int)XLA_FFI_DataType_U8);
SAME(GT_XLA_U16, (int)XLA_FFI_DataType_U16);
SAME(GT_XLA_U32, (int)XLA_FFI_DataType_U32);
SAME(GT_XLA_F16, (int)XLA_FFI_DataType_F16);
SAME(GT_XLA_F32, (int)XLA_FFI_DataType_F32);
SAME(GT_XLA_F64, (int)XLA_FFI_DataType_F64);
SAME(GT_XLA_BF16, (int)XLA_FFI_DataType_BF16);
SAME(GT_XLA_COMMAND_BUFFERS, (int)XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
SAME(GT_XLA_INVALID_ARGUMENT, (int)XLA_FFI_Error_Code_INVALID_ARGUMENT);
SAME(GT_XLA_RESOURCE_EXHAUSTED, (int)XLA_FFI_Error_Code_RESOURCE_EXHAUSTED);
SAME(GT_XLA_UNIMPLEMENTED, (int)XLA_FFI_Error_Code_UNIMPLEMENTED);
SAME(GT_XLA_INTERNAL, (int)XLA_FFI_Error_Code_INTERNAL);
SAME(GT_XLA_MAJOR, XLA_FFI_API_MAJOR);
_Static_assert(GT_XLA_MINOR <= XLA_FFI_API_MINOR, "the handlers are of a later version than the host");

FIELD(gt_xla_extension, struct_size, EXTENSION, struct_size);
FIELD(gt_xla_extension, type, EXTENSION, type);
FIELD(gt_xla_extension, next, EXTENSION, next);
FIELD(gt_xla_version, extensions, XLA_FFI_Api_Version, extension_start);
FIELD(gt_xla_version, major, XLA_FFI_Api_Version, major_version);
FIELD(gt_xla_version, minor, XLA_FFI_Api_Version, minor_version);
FIELD(gt_xla_metadata, version, XLA_FFI_Metadata, api_version);
FIELD(gt_xla_metadata, traits, XLA_FFI_Metadata, traits);
FIELD(gt_xla_metadata_query, base, XLA_FFI_Metadata_Extension, extension_base);
FIELD(gt_xla_metadata_query, metadata, XLA_FFI_Metadata_Extension, metadata);
FIELD(gt_xla_text, data, XLA_FFI_ByteSpan, ptr);
FIELD(gt_xla_text, size, XLA_FFI_ByteSpan, len);
FIELD(gt_xla_scalar, dtype, XLA_FFI_Scalar, dtype);
FIELD(gt_xla_scalar, value, XLA_FFI_Scalar, value);
FIELD(gt_xla_buffer, dtype, XLA_FFI_Buffer, dtype);
FIELD(gt_xla_buffer, data, XLA_FFI_Buffer, data);
FIELD(gt_xla_buffer, rank, XLA_FFI_Buffer, rank);
FIELD(gt_xla_buffer, sizes, XLA_FFI_Buffer, dims);
FIELD(gt_xla_buffers, count, XLA_FFI_Args, size);
FIELD(gt_xla_buffers, types, XLA_FFI_Args, types);
FIELD(gt_xla_buffers, buffers, XLA_FFI_Args, args);
FIELD(gt_xla_buffers, count, XLA_FFI_Rets, size);
FIELD(gt_xla_buffers, types, XLA_FFI_Rets, types);
FIELD(gt_xla_buffers, buffers, XLA_FFI_Rets, rets);
FIELD(gt_xla_attributes, count, XLA_FFI_Attrs, size);
FIELD(gt_xla_attributes, types, XLA_FFI_Attrs, types);
FIELD(gt_xla_attributes, names, XLA_FFI_Attrs, names);
FIELD(gt_xla_attributes, values, XLA_FFI_Attrs, attrs);
FIELD(gt_xla_frame, extensions, XLA_FFI_CallFrame, extension_start);
FIELD(gt_xla_frame, api, XLA_FFI_CallFrame, api);
FIELD(gt_xla_frame, context, XLA_FFI_CallFrame, ctx);
FIELD(gt_xla_frame, stage, XLA_FFI_CallFrame, stage);
FIELD(gt_xla_frame, operands, XLA_FFI_CallFrame, args);
FIELD(gt_xla_frame, results, XLA_FFI_CallFrame, rets);
FIELD(gt_xla_frame, attributes, XLA_FFI_CallFrame, attrs);
FIELD(gt_xla_error_create, message, XLA_FFI_Error_Create_Args, message);
FIELD(gt_xla_error_create, code, XLA_FFI_Error_Create_Args, errc);
SIZE(gt_xla_error_create, code, XLA_FFI_Error_Create_Args);
FIELD(gt_xla_error_message, error, MESSAGE_ARGS, error);
FIELD(gt_xla_error_message, message, MESSAGE_ARGS, message);
#if XLA_FFI_API_MINOR >= 4
FIELD(gt_xla_error_message, code, XLA_FFI_Error_GetDetails_Args, errc);
#endif
_Static_assert(sizeof(gt_xla_error_message) >= sizeof(MESSAGE_ARGS), "the host writes more");
FIELD(gt_xla_error_destroy, error, XLA_FFI_Error_Destroy_Args, error);
SIZE(gt_xla_error_destroy, error, XLA_FFI_Error_Destroy_Args);
FIELD(gt_xla_handler_register, name, XLA_FFI_Handler_Register_Args, name);
FIELD(gt_xla_handler_register, platform, XLA_FFI_Handler_Register_Args, platform);
FIELD(gt_xla_handler_register, instantiate, XLA_FFI_Handler_Register_Args, bundle.instantiate);
FIELD(gt_xla_handler_register, execute, XLA_FFI_Handler_Register_Args, bundle.execute);
#if XLA_FFI_API_MINOR >= 4
FIELD(gt_xla_handler_register, next.record, XLA_FFI_Handler_Register_Args, bundle.record);
FIELD(gt_xla_handler_register, traits, XLA_FFI_Handler_Register_Args, traits);
SIZE(gt_xla_handler_register, traits, XLA_FFI_Handler_Register_Args);
#else
FIELD(gt_xla_handler_register, next.traits, XLA_FFI_Handler_Register_Args, traits);
SIZE(gt_xla_handler_register, next.traits, XLA_FFI_Handler_Register_Args);
#endif
FIELD(gt_xla_stream_get, context, XLA_FFI_Stream_Get_Args, ctx);
FIELD(gt_xla_stream_get, stream, XLA_FFI_Stream_Get_Args, stream);
SIZE(gt_xla_stream_get, stream, XLA_FFI_Stream_Get_Args);
FIELD(gt_xla_api, version, XLA_FFI_Api, api_version);
FIELD(gt_xla_api, error_create, XLA_FFI_Api, XLA_FFI_Error_Create);
FIELD(gt_xla_api, error_message, XLA_FFI_Api, MESSAGE);
FIELD(gt_xla_api, error_destroy, XLA_FFI_Api, XLA_FFI_Error_Destroy);
FIELD(gt_xla_api, handler_register, XLA_FFI_Api, XLA_FFI_Handler_Register);
FIELD(gt_xla_api, stream_get, XLA_FFI_Api, XLA_FFI_Stream_Get);
