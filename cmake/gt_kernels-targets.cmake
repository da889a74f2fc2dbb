# The targets of gt_kernels, which are the same in its source tree and in an installation.  The variables
# gt_kernels_include_dir and gt_kernels_reference_dir must be set.
#   gt_kernels::headers         gt_kernels.h, for targets that call the library
#   gt_kernels::implementation  the kernels if the language CUDA is enabled before this file is read, else stubs in C
#                               or C++ that answer GT_ERROR_NO_CUDA
#   gt_kernels::reference       the same with the CPU twins, which need the language C
# The last two are sources, and each target that links them compiles them: link them PRIVATE to one target of a program.
# That target decides the GPU architectures: CMAKE_CUDA_ARCHITECTURES.

if(NOT TARGET gt_kernels::headers)
    add_library(gt_kernels::headers INTERFACE IMPORTED GLOBAL)
    target_include_directories(gt_kernels::headers INTERFACE ${gt_kernels_include_dir})

    # The languages of this directory.  CMake silently leaves out sources of any other language.
    if(CMAKE_CUDA_COMPILER_LOADED)
        set(gt_suffix cu)
    elseif(CMAKE_CXX_COMPILER_LOADED AND NOT CMAKE_C_COMPILER_LOADED)
        set(gt_suffix cpp)
    else()
        set(gt_suffix c)
    endif()
    # One file for each part, so that the parts compile in parallel.  The parts are the library's .cuh files.
    add_library(gt_kernels::implementation INTERFACE IMPORTED GLOBAL)
    target_link_libraries(gt_kernels::implementation INTERFACE gt_kernels::headers)
    file(GLOB gt_parts RELATIVE ${gt_kernels_include_dir} ${gt_kernels_include_dir}/gt_*.cuh)
    foreach(gt_part gt_core.cuh ${gt_parts})
        string(REPLACE .cuh "" gt_part ${gt_part})
        set(gt_file ${CMAKE_CURRENT_BINARY_DIR}/gt_kernels-implementation/${gt_part}.${gt_suffix})
        string(TOUPPER ${gt_part} gt_part)
        set(gt_text "#define ${gt_part}_IMPLEMENTATION\n#include \"gt_kernels.h\"\n")
        set(gt_written "")
        if(EXISTS ${gt_file})
            file(READ ${gt_file} gt_written)
        endif()
        if(NOT gt_written STREQUAL gt_text) # a new file would be compiled again, for minutes
            file(WRITE ${gt_file} ${gt_text})
        endif()
        target_sources(gt_kernels::implementation INTERFACE ${gt_file})
    endforeach()
    if(gt_suffix STREQUAL cu)
        target_compile_features(gt_kernels::implementation INTERFACE cuda_std_17)
    endif()

    add_library(gt_kernels::reference INTERFACE IMPORTED GLOBAL)
    target_link_libraries(gt_kernels::reference INTERFACE gt_kernels::implementation)
    if(CMAKE_C_COMPILER_LOADED)
        target_include_directories(gt_kernels::reference INTERFACE ${gt_kernels_reference_dir})
        target_compile_features(gt_kernels::reference INTERFACE c_std_11)
        file(GLOB gt_files ${gt_kernels_reference_dir}/*.c)
        target_sources(gt_kernels::reference INTERFACE ${gt_files})
        if(UNIX)
            target_link_libraries(gt_kernels::reference INTERFACE m)
        endif()
    else()
        # This file does not exist.  CMake stops where a target links this target, and prints the name.
        target_sources(gt_kernels::reference INTERFACE "${CMAKE_CURRENT_BINARY_DIR}/gt_kernels::reference needs the \
language C: enable it before gt_kernels is found, as project(... LANGUAGES C ...) does")
    endif()
endif()
