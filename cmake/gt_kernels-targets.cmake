# The targets of gt_kernels, the same in its source tree and installed.  Wants gt_kernels_include_dir and
# gt_kernels_reference_dir.
#
#   gt_kernels::headers         gt_kernels.h, for targets that call the library
#   gt_kernels::implementation  the kernels if the language CUDA is enabled before this file is read, else stubs that
#                               answer GT_ERROR_NO_CUDA
#   gt_kernels::reference       the CPU twins
#
# The last two are sources, compiled as part of each target that links them: link them PRIVATE to one target of a
# program.  GPU architectures are that target's: CMAKE_CUDA_ARCHITECTURES.

if(NOT TARGET gt_kernels::headers)
    add_library(gt_kernels::headers INTERFACE IMPORTED GLOBAL)
    target_include_directories(gt_kernels::headers INTERFACE ${gt_kernels_include_dir})

    # A file for each part, so that they compile in parallel.
    get_property(gt_languages GLOBAL PROPERTY ENABLED_LANGUAGES)
    if(CUDA IN_LIST gt_languages)
        set(gt_suffix cu)
    else()
        set(gt_suffix c)
    endif()
    add_library(gt_kernels::implementation INTERFACE IMPORTED GLOBAL)
    target_link_libraries(gt_kernels::implementation INTERFACE gt_kernels::headers)
    foreach(gt_part CORE WKV6 SSM CONV1D FUSED)
        string(TOLOWER gt_${gt_part}.${gt_suffix} gt_file)
        set(gt_file ${CMAKE_CURRENT_BINARY_DIR}/gt_kernels-implementation/${gt_file})
        file(CONFIGURE OUTPUT ${gt_file} CONTENT
            "#define GT_${gt_part}_IMPLEMENTATION\n#include \"gt_kernels.h\"\n" @ONLY)
        target_sources(gt_kernels::implementation INTERFACE ${gt_file})
    endforeach()
    if(gt_suffix STREQUAL cu)
        target_compile_features(gt_kernels::implementation INTERFACE cuda_std_17)
    endif()

    add_library(gt_kernels::reference INTERFACE IMPORTED GLOBAL)
    target_link_libraries(gt_kernels::reference INTERFACE gt_kernels::headers)
    target_include_directories(gt_kernels::reference INTERFACE ${gt_kernels_reference_dir})
    target_compile_features(gt_kernels::reference INTERFACE c_std_11)
    file(GLOB gt_files ${gt_kernels_reference_dir}/*.c)
    target_sources(gt_kernels::reference INTERFACE ${gt_files})
    if(UNIX)
        target_link_libraries(gt_kernels::reference INTERFACE m)
    endif()
endif()
