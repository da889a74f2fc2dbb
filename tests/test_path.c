/* Tests queries, which launch no kernels.  gt_OP_path must list kernels for every case of the tables and every
 * pass.  For wkv6 it must also give the reasons for any-size kernels.  gt_OP_workspace must answer fast for any
 * seq_capacity. */
#define _POSIX_C_SOURCE 199309L
#include "gt_test.h"
#include "test_kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Checks gt_OP_path for a case.  The call has no pointers, so a kernel that ran would fault. */
static void check_case(const test_case *c) {
    char text[1024], cut[20];
    gt_status status = test_table(c)->calls.path(&c->args, text, sizeof text);
    const int has_step = strstr(text, "; step: ") != NULL;
    if (!test_check(status == GT_OK, "%s %s: %s", c->op, c->name, gt_last_error())) return;
    test_check(!strncmp(text, "forward: ", 9) && strstr(text, "; backward: ") && strlen(text) < 600, "%s %s: %s", c->op,
               c->name, text);
    test_check(test_get_size(c, c->op[0] == 'r' || c->op[0] == 'n' ? 'M' : 'T') == 0 || strstr(text, "kernel"),
               "%s %s: %s", c->op, c->name, text);
    if (has_step) test_check(test_op_of(c->op)->twin[GT_STEP] != NULL, "%s has no step: %s", c->op, text);
    memset(cut, 'x', sizeof cut);
    status = test_table(c)->calls.path(&c->args, cut, sizeof cut - 1);
    test_check(status == GT_OK && !strncmp(cut, text, sizeof cut - 2) && cut[sizeof cut - 2] == 0 &&
                   cut[sizeof cut - 1] == 'x',
               "%s %s: a text of 18 characters: %s", c->op, c->name, cut);
}

static void expect(const gt_wkv6_args *a, const char *words) {
    char text[1024];
    gt_status status = gt_wkv6_path(a, text, sizeof text);
    test_check(status == GT_OK && strstr(text, words), "wkv6: '%s' is not in '%s' (%d)", words, text, status);
}

static void expect_not(const gt_wkv6_args *a, const char *words) {
    char text[1024];
    gt_status status = gt_wkv6_path(a, text, sizeof text);
    test_check(status == GT_OK && !strstr(text, words), "wkv6: '%s' is in '%s' (%d)", words, text, status);
}

/* A misaligned address far from all other memory.  Nothing reads or writes there. */
static char *const apart = (char *)(((uintptr_t)1 << 40) + 2);

static void test_wkv6(void) {
    const gt_wkv6_args good = {.B = 2, .T = 128, .H = 2, .N = 64, .dtype = GT_BF16};
    static float memory[64];
    gt_wkv6_args a = good;
    expect_not(&a, "any-size");
    expect_not(&a, "step: ");
    expect(&a, "forward: forward_tensor_kernel; backward: ");
    expect(&a, "backward_tensor_kernel");
    a.saved = memory, a.saved_bytes = 1 << 30;
    expect_not(&a, "forward: forward_tensor_kernel; backward: forward");
    a = good, a.N = 128;
    expect(&a, "forward: forward_hopper_kernel;");
    a = good, a.T = 16;
    expect(&a, "; step: step_kernel");
    expect_not(&a, "any-size");
    a = good, a.V = 32;
    expect(&a, "forward: token_kernel (any-size kernels: N and V differ); backward: ");
    a = good, a.N = 48;
    expect(&a, "(any-size kernels: N is not 32, 64 or 128)");
    a = good, a.k_stride.t = 2 * 64 + 4;
    expect(&a, "forward: token_kernel (any-size kernels: rows of k are not aligned to 16 bytes); backward: ");
    a = good, a.w_stride.t = 1 << 24;
    expect(&a, "rows of w are 2^24 elements apart");
    a = good, a.y = memory + 1;
    expect(&a, "rows of y are not aligned to 16 bytes); backward: ");
    expect(&a, "backward_tensor_kernel");
    a = good, a.dk = (char *)memory + 2;
    expect(&a, "forward: forward_tensor_kernel; backward: ");
    expect(&a, "(any-size kernels: rows of dk are not aligned to 8 bytes)");
    a = good, a.state_out = memory + 1;
    expect(&a, "state_out is not aligned to 16 bytes");
    a = good, a.T = 256, a.snapshot_every = 128;
    expect(&a, "forward: forward_tensor_kernel; backward: ");
    a.snapshots = memory + 1;
    expect(&a, "(any-size kernels: snapshots is not aligned to 16 bytes); backward: ");
    a.snapshot_dtype = GT_BF16;
    expect(&a, "forward: forward_tensor_kernel, store_snapshots_kernel; backward: ");
    a = good, a.u = memory + 1;
    expect(&a, "(any-size kernels: u is not aligned to 16 bytes)");
    a = good;
    expect_not(&a, "segment");
    a.decay_out = memory;
    expect(&a, "; segment: states_tensor_kernel, scan_segments_kernel; segment backward: states_tensor_kernel, ");
    a.r = apart;
    expect(&a, "; segment: states_tensor_kernel, scan_segments_kernel; segment backward: token_kernel, decay_kernel "
               "(any-size kernels: rows of r are not aligned to 16 bytes)");
    a.state_in_shared = 1;
    expect(&a, "; segment: states_tensor_kernel, scan_segments_kernel");
    expect_not(&a, "segment backward");
    a.N = 128;
    expect(&a, "; segment: states_hopper_kernel, scan_segments_kernel");
    a = good, a.T = 0;
    expect(&a, "forward: no kernels; backward: reduce_rows"); /* backward sets du to zero */
    a = good;
    if (machine_choose("sm_75")) {
        expect(&a, "the device is older than sm_80");
        machine_choose("sm_90");
    }
}

static void expect_ssd(const gt_ssd_args *a, const char *words) {
    char text[1024];
    gt_status status = gt_ssd_path(a, text, sizeof text);
    test_check(status == GT_OK && strstr(text, words), "ssd: '%s' is not in '%s' (%d)", words, text, status);
}

/* Tests the paths of ssd on one device.  Calls that tensor cores cannot compute must go to the any-size kernels.  The
 * arguments are names of the kernels that the device must use:
 *     fastest          forward on tensor cores
 *     fastest_chunks   chunks of backward in 16 bits
 *     fp32_forward     forward in fp32
 *     fp32_chunks      chunks of backward in fp32
 *     of_states        passes over states, also in segment
 *     of_gate          backward with z: the first kernel, which computes dz or dy silu(z)
 */
static void test_ssd_of(const char *fastest, const char *fastest_chunks, const char *fp32_forward,
                        const char *fp32_chunks, const char *of_states, const char *of_gate) {
    char words[128];
    static float memory[64];
    float *const states[] = {memory, memory + 2, memory + 1};
    const gt_ssd_args good = {.B = 2, .T = 300, .H = 2, .P = 64, .N = 64, .dtype = GT_BF16, .softplus = 1};
    for (int i = 0; i < 3; i++) { /* states at multiples of 16, 8 and 4 bytes */
        const char *forward = i < 2 ? fastest : "forward: forward_kernel;";
        const char *backward = i < 2 ? fastest_chunks : "backward_kernel";
        gt_ssd_args a = good;
        a.state_in = states[i];
        expect_ssd(&a, forward);
        a = good, a.state_out = states[i];
        expect_ssd(&a, forward);
        a = good, a.dstate_in = states[i];
        expect_ssd(&a, backward);
        a = good, a.dstate_out = states[i];
        expect_ssd(&a, backward);
    }
    gt_ssd_args a = good;
    a.x = (char *)memory + 8;
    expect_ssd(&a, "forward: forward_kernel;");
    a = good, a.dtype = GT_F32;
    snprintf(words, sizeof words, "forward: %s", fp32_forward);
    expect_ssd(&a, words);
    expect_ssd(&a, fp32_chunks);
    a.N = 32;
    expect_ssd(&a, words);
    expect_ssd(&a, fp32_chunks);
    a.G = 2; /* each group is a single unit of work */
    expect_ssd(&a, "forward: forward_fp32_kernel;");
    a.G = 0, a.z = memory;
    snprintf(words, sizeof words, "backward: %s", fp32_forward);
    expect_ssd(&a, words);
    a.z = NULL, a.N = 16;
    expect_ssd(&a, "forward: forward_fp32_kernel;");
    expect_ssd(&a, ", chunk_gradient_fp32_kernel, chunk_times_fp32_kernel");
    a.N = 64;
    a.x = (char *)memory + 8;
    expect_ssd(&a, "forward: forward_kernel;");
    expect_ssd(&a, "backward_kernel");
    a.x = NULL, a.N = 250;
    expect_ssd(&a, "forward: forward_kernel;");
    a.N = 256;
    expect_ssd(&a, "forward: forward_fp32_kernel (2 times);");
    expect_ssd(&a, fp32_chunks);
    expect_ssd(&a, "_kernel (2 times), chunk_times_fp32_kernel");
    a = good, a.N = 256;
    expect_ssd(&a, fastest_chunks);
    expect_ssd(&a, "_kernel (2 times), ");
    a = good, a.N = 250;
    expect_ssd(&a, "forward: forward_kernel;");
    a = good, a.z = memory;
    expect_ssd(&a, of_gate);
    expect_ssd(&a, fastest_chunks);
    a.saved = memory, a.saved_bytes = 1 << 30;
    expect_ssd(&a, of_gate);
    a = good, a.decay_out = memory, a.z = apart;
    snprintf(words, sizeof words, "; segment: %s", of_states);
    expect_ssd(&a, words);
    expect_ssd(&a, ", scan_segments_kernel; segment backward: reverse_states_kernel, ");
    a = good, a.N = 32;
    expect_ssd(&a, fastest_chunks);
    /* the step kernel takes any alignment and size */
    a = good, a.T = 16;
    expect_ssd(&a, "; step: step_kernel");
    a.x = (char *)memory + 2, a.N = 250;
    expect_ssd(&a, "; step: step_kernel");
}

static void test_selective_scan(void) {
    const gt_selective_scan_args a = {.B = 2, .T = 16, .D = 64, .N = 16, .dtype = GT_BF16};
    char text[1024];
    const gt_status status = gt_selective_scan_path(&a, text, sizeof text);
    test_check(status == GT_OK && strstr(text, "forward: forward_kernel; ") && strstr(text, "; step: step_kernel"),
               "selective_scan: '%s' (%d)", text, status);
}

static void test_steps_of_two(void) {
    static const int32_t words[2];
    gt_conv_ssd_args conv_ssd = {.B = 2, .T = 1, .H = 2, .P = 64, .N = 128, .W = 4, .dtype = GT_BF16};
    gt_wkv_ssm_args both = {
        .B = 2, .T = 16, .dtype = GT_BF16, .wkv6 = {.H = 2, .N = 64}, .ssd = {.H = 2, .P = 64, .N = 128}};
    char text[1024];
    gt_status status = gt_conv_ssd_path(&conv_ssd, text, sizeof text);
    test_check(status == GT_OK && strstr(text, "; step: step_kernel, columns_kernel"), "conv_ssd: '%s' (%d)", text,
               status);
    test_check(!strstr(text, "states_kernel;"), "conv_ssd: '%s'", text);
    conv_ssd.state_dtype = GT_BF16, conv_ssd.conv_state_dtype = GT_F16; /* a step takes neither */
    conv_ssd.rounding_seed = conv_ssd.rounding_steps = words;
    status = gt_conv_ssd_path(&conv_ssd, text, sizeof text);
    test_check(status == GT_OK && strstr(text, ", store_states_kernel; backward: ") &&
                   strstr(text, "; step: step_kernel, columns_kernel"),
               "conv_ssd with states of 16 bits: '%s' (%d)", text, status);
    status = gt_wkv_ssm_path(&both, text, sizeof text);
    test_check(status == GT_OK && strstr(text, "; step: ssd step_kernel, wkv6 step_kernel"), "wkv_ssm: '%s' (%d)", text,
               status);
    both.T = 17;
    status = gt_wkv_ssm_path(&both, text, sizeof text);
    test_check(status == GT_OK && !strstr(text, "step: "), "wkv_ssm: '%s' (%d)", text, status);
}

/* The kernel of ssd that also convolves x takes only aligned rows.  Rows of xBC that are not aligned, with sizes that
 * this kernel takes, must run the kernels for any size. */
static void test_rows_of_conv_ssd(void) {
    gt_conv_ssd_args a = {.B = 1, .T = 130, .H = 16, .P = 64, .N = 80, .W = 4, .dtype = GT_BF16};
    gt_workspace need;
    char text[1024];
    gt_status status = gt_conv_ssd_path(&a, text, sizeof text);
    test_check(status == GT_OK && strstr(text, "forward: groups_kernel, forward_kernel"), "conv_ssd: '%s' (%d)", text,
               status);
    a.xBC = apart;
    status = gt_conv_ssd_path(&a, text, sizeof text);
    test_check(status == GT_OK && strstr(text, "_kernel, ") && !strstr(text, "groups_kernel"), "conv_ssd: '%s' (%d)",
               text, status);
    status = gt_conv_ssd_workspace(&a, &need);
    test_check(status == GT_OK && need.forward > 0, "conv_ssd: status %d", status);
}

/* A mixed call launches ssd first, and names its kernels in the order of launches. */
static void test_mixed_path(void) {
    static float memory[64];
    gt_workspace plain, mixed;
    gt_wkv_ssm_args a = {.B = 2,
                         .T = 300,
                         .dtype = GT_BF16,
                         .mixed = memory,
                         .dmixed = memory,
                         .segments = 1,
                         .wkv6 = {.H = 2, .N = 64},
                         .ssd = {.H = 2, .P = 64, .N = 128}};
    const gt_stride by_head = {2 * 300 * 64, 64, 300 * 64};
    char text[1024];
    gt_status status = gt_wkv_ssm_path(&a, text, sizeof text);
    const char *const ssd = strstr(text, "forward: ssd "), *const sum = strstr(text, "wkv6 forward_mixed_kernel; ");
    test_check(status == GT_OK && ssd && sum && ssd < sum, "mixed: '%s' (%d)", text, status);
    /* Backward without gains runs the kernels of a plain call on dmixed, and needs as much workspace. */
    for (int heads = 2; heads <= 4; heads += 2) { /* heads of ssd */
        a.ssd.H = heads, a.ssd.P = 128 / heads;
        for (int pointer = 0; pointer < 5; pointer++) {
            const int is_plain = pointer == 0;
            a.gain_wkv = pointer == 1 ? memory : NULL, a.gain_ssm = pointer == 2 ? memory : NULL;
            a.dgain_wkv = pointer == 3 ? memory : NULL, a.dgain_ssm = pointer == 4 ? memory : NULL;
            status = gt_wkv_ssm_path(&a, text, sizeof text);
            test_check(status == GT_OK && (strstr(text, "unmix_kernel") == NULL) == is_plain, "mixed, %d: '%s' (%d)",
                       pointer, text, status);
            status = gt_wkv_ssm_workspace(&a, &mixed);
            gt_wkv_ssm_args one = a;
            one.mixed = NULL, one.dmixed = NULL, one.dgain_wkv = one.dgain_ssm = NULL;
            if (status == GT_OK) status = gt_wkv_ssm_workspace(&one, &plain);
            test_check(status == GT_OK && mixed.backward >= plain.backward &&
                           (mixed.backward == plain.backward) == is_plain,
                       "mixed, %d: %zu and %zu bytes (%d)", pointer, mixed.backward, plain.backward, status);
        }
        a.dgain_ssm = NULL, a.dmixed_stride = by_head; /* fits only ssd's heads of the same size */
        status = gt_wkv_ssm_path(&a, text, sizeof text);
        test_check(status == GT_OK && (strstr(text, "unmix_kernel") == NULL) == (heads == 2),
                   "mixed, by head: '%s' (%d)", text, status);
        a.dmixed_stride = (gt_stride){0, 0, 0};
    }
    a.ssd.H = 2, a.ssd.P = 64;
    a.residual = (char *)memory + 2; /* not aligned */
    status = gt_wkv_ssm_path(&a, text, sizeof text);
    test_check(status == GT_OK && strstr(text, "wkv6 token_kernel; "), "mixed: '%s' (%d)", text, status);
    a.residual = NULL, a.ssd.P = 32, a.ssd.H = 3;
    status = gt_wkv_ssm_path(&a, text, sizeof text);
    test_check(status == GT_ERROR_SIZE && strstr(gt_last_error(), "ssd.H = 3, ssd.P = 32: H V must equal H P"),
               "mixed: %d: %s", status, gt_last_error());
}

/* If a grid is too large for the second launch of a step, the call must be refused before the first launch runs. */
static void test_grid_of_both(void) {
    gt_wkv_ssm_args a = {.B = 70000, .T = 1, .wkv6 = {.H = 70000, .N = 1}, .ssd = {.H = 1, .P = 1, .N = 1}};
    const gt_op *op = gt_op_wkv_ssm();
    for (int i = 0; op->tensors[i].name; i++) {
        void *const address = (void *)((uintptr_t)(i + 1) << 44);
        if (strchr("IOs", gt_use(&op->tensors[i], GT_STEP)))
            memcpy((char *)&a + op->tensors[i].offset, &address, sizeof address);
    }
    const gt_status status = gt_wkv_ssm_step(&a, NULL);
    test_check(status == GT_ERROR_SIZE &&
                   strstr(gt_last_error(), "wkv6.H = 70000: 4900000000 blocks are too many for a grid"),
               "wkv_ssm: %d: %s", status, gt_last_error());
}

static void test_ssd(void) {
    /* on a GPU the test cannot choose the device, and checks only what all devices share */
    if (!machine_choose("sm_86")) {
        test_ssd_of("forward: forward_", "chunk_gradient_", "forward_fp32_", "chunk_gradient_fp32_", "states_",
                    "backward: ");
        return;
    }
    test_ssd_of("forward: forward_tensor_kernel;", "chunk_gradient_kernel", "forward_fp32_kernel",
                "chunk_gradient_fp32_kernel", "states_tensor_kernel",
                "backward: forward_tensor_kernel, states_tensor_kernel");
    const gt_ssd_args wide = {.B = 1, .T = 3000, .H = 2, .P = 64, .N = 256, .dtype = GT_BF16};
    expect_ssd(&wide,
               "forward: states_tensor_kernel (2 times), scan_segments_kernel, forward_tensor_kernel (2 times);");
    machine_choose("sm_90");
    test_ssd_of("forward: forward_hopper_kernel;", "chunk_gradient_hopper_kernel", "forward_fp32_hopper_kernel",
                "chunk_gradient_fp32_hopper_kernel", "states_hopper_kernel",
                "backward: gate_kernel, states_hopper_kernel");
    /* Each group is a single unit (see gt/ssd/mma/state.cuh).  Such calls use forward_hopper_kernel, except for dz and
     * for more than 128 columns. */
    gt_ssd_args alone = {.B = 2, .T = 300, .H = 2, .P = 64, .N = 64, .G = 2, .dtype = GT_BF16};
    expect_ssd(&alone, "forward: forward_hopper_kernel; backward: states_hopper_kernel (2 times), ");
    alone.z = apart - 2;
    expect_ssd(&alone, "forward: forward_hopper_kernel; backward: gate_kernel, states_hopper_kernel (2 times), ");
    alone.z = NULL, alone.N = 256;
    expect_ssd(&alone, "forward: forward_tensor_kernel (2 times); backward: states_hopper_kernel (4 times), ");
    /* the states of segments take one launch for each 128 columns */
    expect_ssd(&wide, "forward: states_hopper_kernel (2 times), scan_segments_kernel, forward_hopper_kernel;");
    static float memory[64];
    gt_ssd_args gated = wide;
    gated.z = memory;
    /* dz is computed last, because its memory first holds dy silu(z) */
    expect_ssd(&gated, "backward: gate_kernel, states_hopper_kernel (2 times), scan_segments_kernel, ");
    expect_ssd(&gated, ", chunk_times_kernel, states_hopper_kernel (2 times), scan_segments_kernel, "
                       "forward_hopper_kernel, reduce_rows");
    gated.decay_out = memory, gated.z = apart + 14; /* a multiple of 16 */
    expect_ssd(&gated, "; segment backward: gate_kernel, states_hopper_kernel (2 times), scan_segments_kernel");
    /* many heads share B and C, so forward_maps_kernel pays */
    gt_ssd_args many = {.B = 8, .T = 600, .H = 48, .P = 64, .N = 128, .dtype = GT_BF16};
    expect_ssd(&many, "forward: group_rows_kernel, forward_maps_kernel; ");
    many.H = 16;
    expect_ssd(&many, "forward: forward_hopper_kernel; ");
    many.z = memory;
    expect_ssd(&many, "forward: group_rows_kernel, forward_maps_kernel; ");
    many.z = memory + 1; /* z is not aligned */
    expect_ssd(&many, "forward: forward_kernel");
    many.z = memory, many.G = 4;
    expect_ssd(&many, "forward: forward_hopper_kernel; ");
    many.G = 1, many.P = 80;
    expect_ssd(&many, "forward: forward_hopper_kernel; ");
    /* if backward reads y, one kernel computes dz and dy silu(z) */
    gated = (gt_ssd_args){.B = 2, .T = 600, .H = 2, .P = 64, .N = 64, .segments = 1, .reads_y = 1, .dtype = GT_BF16};
    gated.z = memory, gated.y = apart + 14, gated.saved = memory, gated.saved_bytes = 1 << 30;
    expect_ssd(&gated, "backward: gate_kernel, states_hopper_kernel, chunk_factors_kernel, "
                       "chunk_gradient_hopper_kernel, chunk_times_kernel, gate_lost_kernel, reduce_rows");
    gated.segments = 2;
    expect_ssd(&gated, "backward: gate_kernel, states_hopper_kernel, scan_segments_kernel, states_hopper_kernel, ");
    gated.segments = 1, gated.N = 256;
    expect_ssd(&gated, "backward: gate_kernel, states_hopper_kernel (2 times), ");
    /* if each group is a single unit, a kernel that reads z itself computes dz */
    gated = alone, gated.N = 64, gated.z = memory;
    expect_ssd(&gated, "backward: gate_kernel, states_hopper_kernel (2 times), chunk_factors_kernel, "
                       "chunk_gradient_hopper_kernel, chunk_times_kernel, forward_tensor_kernel, ");
}

/* Checks the sizes of ssd's `saved` and workspace, as multiples of the bytes of y.  `saved` has a state in f16 for
 * every 128 tokens, but is empty for sequences of up to 128 tokens. */
static void test_ssd_memory(void) {
    static const struct {
        const char *device;
        /* backward's workspace with `saved` holds G, and on 9.0 also one record for each token */
        double backward, with_channels;
    } devices[] = {{"sm_80", 1.03, 1.07}, {"sm_86", 1.03, 1.07}, {"sm_90", 1.33, 1.46}};
    static float memory[64];
    for (int i = 0; i < 3 && machine_choose(devices[i].device); i++) {
        gt_ssd_args a = {.B = 8, .T = 4096, .H = 64, .P = 64, .N = 128, .dtype = GT_BF16, .saved_bytes = 1 << 30};
        const double y = 2.0 * 8 * 4096 * 64 * 64;
        gt_workspace need;
        a.dx = a.ddt = a.dBm = a.dCm = a.dA = a.ddt_bias = a.dDskip = memory, a.saved = memory;
        test_check(gt_ssd_workspace(&a, &need) == GT_OK && need.saved <= 1.02 * y &&
                       need.backward <= devices[i].backward * y,
                   "%s: too much memory: saved takes %.3f and backward %.3f of the bytes of y", devices[i].device,
                   need.saved / y, need.backward / y);
        a.Dskip_per_channel = 1;
        test_check(gt_ssd_workspace(&a, &need) == GT_OK && need.backward <= devices[i].with_channels * y,
                   "%s: too much memory: backward with Dskip per channel takes %.3f of the bytes of y",
                   devices[i].device, need.backward / y);
        a.Dskip_per_channel = 0;
        a.T = 128;
        test_check(gt_ssd_workspace(&a, &need) == GT_OK && need.saved == 0,
                   "%s: saved for 128 tokens has %zu bytes: must be 0", devices[i].device, need.saved);
        a.T = 129;
        test_check(gt_ssd_workspace(&a, &need) == GT_OK && need.saved > 0, "%s: saved for 129 tokens has no bytes",
                   devices[i].device);
    }
}

static void test_errors(void) {
    gt_wkv6_args a = {.B = 1, .T = 1, .H = 1, .N = 1};
    char text[8] = "before";
    test_check(gt_wkv6_path(NULL, text, sizeof text) == GT_ERROR_NULL &&
                   !strcmp(gt_last_error(), "gt_wkv6_path: args is NULL") && !text[0],
               "%s", gt_last_error());
    test_check(gt_wkv6_path(&a, NULL, 8) == GT_ERROR_NULL && !strcmp(gt_last_error(), "gt_wkv6_path: text is NULL"),
               "%s", gt_last_error());
    test_check(gt_wkv6_path(&a, text, 0) == GT_ERROR_NULL &&
                   !strcmp(gt_last_error(), "gt_wkv6_path: bytes = 0: must be at least 1"),
               "%s", gt_last_error());
    a.N = 0;
    test_check(gt_wkv6_path(&a, text, sizeof text) == GT_ERROR_SIZE &&
                   !strncmp(gt_last_error(), "gt_wkv6_path: N = 0", 19),
               "%s", gt_last_error());
    a.N = 257;
    test_check(gt_wkv6_path(&a, text, sizeof text) == GT_ERROR_UNSUPPORTED && strstr(gt_last_error(), "N = 257"), "%s",
               gt_last_error());
}

/* Backward of the norms has two launches: one for gradients and partial sums over rows, one that adds up the sums. */
static void test_norms(void) {
    static const int64_t sizes[][2] = {{16384, 128}, {65536, 512}, {1000, 17}};
    for (int i = 0; i < 3; i++) {
        const gt_norm_mix_args mix = {.M = sizes[i][0], .D = sizes[i][1], .dtype = GT_BF16};
        const gt_norm_gate_args gate = {.M = sizes[i][0], .D = sizes[i][1], .dtype = GT_BF16};
        char text[2][1024];
        test_check(gt_norm_mix_path(&mix, text[0], sizeof text[0]) == GT_OK &&
                       gt_norm_gate_path(&gate, text[1], sizeof text[1]) == GT_OK,
                   "%s", gt_last_error());
        for (int k = 0; k < 2; k++)
            test_check(!strcmp(text[k], "forward: forward_kernel; backward: backward_kernel, reduce_rows"), "%s: %s",
                       k ? "norm_gate" : "norm_mix", text[k]);
    }
    static const struct {
        int64_t D;
        const char *path;
    } rows[] = {{4096, "forward: forward_kernel; backward: backward_kernel, reduce_rows"},
                {4097, "forward: any_forward_kernel; backward: any_backward_kernel, reduce_rows"}};
    for (int i = 0; i < 2; i++) {
        const gt_add_norm_args add = {.M = 1000, .D = rows[i].D, .dtype = GT_BF16};
        char text[1024];
        test_check(gt_add_norm_path(&add, text, sizeof text) == GT_OK && !strcmp(text, rows[i].path), "add_norm: %s",
                   text);
    }
}

static void expect_step(const gt_rmsnorm_linear_args *a, const char *path) {
    char text[1024] = "";
    const gt_status status = gt_rmsnorm_linear_path(a, text, sizeof text);
    const char *step = strstr(text, "; step: ");
    test_check(status == GT_OK && (path ? step && !strcmp(step + 8, path) : !step), "rmsnorm_linear: '%s' is not '%s'",
               text, path ? path : "without a step");
}

static void test_linear_step(void) {
    gt_rmsnorm_linear_args a = {.M = 1, .D = 4096, .O = 14336, .dtype = GT_BF16};
    expect_step(&a, "step_tensor_kernel");
    a.M = 64;
    expect_step(&a, "step_tensor_kernel");
    a.dtype = GT_F32;
    expect_step(&a, "step_tensor_kernel");
    a.weight_int8 = (const int8_t *)apart; /* this address is no multiple of 16 */
    expect_step(&a, "step_any_kernel");
    a.weight_int8 = NULL, a.D = 4088; /* rows of weight_int8 are no multiples of 16 bytes */
    expect_step(&a, "step_any_kernel");
    a.D = 4096, a.O = 31;
    expect_step(&a, "step_any_kernel");
    a.O = 14336, a.x_stride = 4098;
    expect_step(&a, "step_any_kernel");
    a.x_stride = 0, a.M = 65;
    expect_step(&a, NULL);
    a.M = 1;
    if (machine_choose("sm_75")) {
        expect_step(&a, "step_any_kernel");
        machine_choose("sm_90");
    }
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* The fastest of several queries must take less than a millisecond at any capacity.  For a fixed T, the answer must not
 * grow with the capacity. */
static void check_queries(const test_op *op) {
    static const int64_t capacities[] = {1, 64, 65536, 16000000, INT32_MAX - 1};
    gt_workspace need, first = {0, 0, 0, 0, 0};
    for (int i = 0; i < 5; i++) {
        for (int is_long = 0; is_long < 2; is_long++) {
            test_case c = op->sizes[0];
            double fastest = 1;
            gt_status status = GT_OK;
            test_set_size(&c, 'B', 1);
            test_set_size(&c, 'T', is_long ? INT32_MAX / 4 : 1000);
            test_set_sequences(&c, 1, capacities[i]);
            for (int k = 0; k < 20; k++) {
                const double start = seconds();
                status = op->table()->calls.workspace(&c.args, &need);
                const double taken = seconds() - start;
                if (taken < fastest) fastest = taken;
            }
            test_check(status == GT_OK || status == GT_ERROR_SIZE, "%s, capacity %lld: %s", op->name,
                       (long long)capacities[i], gt_last_error());
            test_check(fastest < 1e-3, "%s, capacity %lld: a query takes %.2e s", op->name, (long long)capacities[i],
                       fastest);
            if (status != GT_OK) continue; /* a state tensor has more than 2^48 elements */
            if (!is_long && capacities[i] == 65536) first = need;
            if (is_long || capacities[i] <= 65536) continue;
            /* bytes for the order of the sequences by length */
            const size_t order = 4 * (size_t)(capacities[i] - 65536) + 256;
            test_check(need.saved == first.saved, "%s: saved for 1000 tokens grows with the capacity", op->name);
            test_check(need.forward <= first.forward + order && need.backward <= first.backward + order &&
                           need.segment <= first.segment + order,
                       "%s: scratch memory for 1000 tokens grows with the capacity", op->name);
        }
    }
}

/* ---- large capacities ------------------------------------------------------------------------ */

/* Returns the number of elements of one sequence's states, without the state of the convolution.  *largest: the same
 * for the largest tensor. */
static double state_elements(const test_case *c, double *largest) {
    test_args filled;
    gt_dims dims;
    double sum = 0;
    *largest = 0;
    for (const gt_tensor *t = test_table(c)->tensors; t->name; t++) {
        if (!test_is(t, "state_out") || strchr(t->shape, 'J')) continue;
        if (gt_prepare(test_table(c), GT_QUERY, GT_HOST, &c->args, &filled, &dims) != GT_OK) return -1;
        const gt_view v = gt_view_of(test_table(c), t, &filled, &dims);
        const double elements = (double)v.count / (double)dims.n['Q' - 'A'];
        sum += elements;
        if (elements > *largest) *largest = elements;
    }
    return sum;
}

/* Checks that no size of memory overflows.  `saved` holds a state for every chunk, in 16 or 32 bits per number.
 * Backward's workspace holds these states instead if forward did not save them. */
static void check_memory(const test_case *sizes, int64_t T, int64_t capacity) {
    test_case c = *sizes;
    gt_workspace need;
    test_set_size(&c, 'B', 1);
    test_set_size(&c, 'T', T);
    test_set_sequences(&c, 1, 1);
    double largest;
    const double elements = state_elements(&c, &largest), limit = (double)((int64_t)1 << 48);
    test_set_sequences(&c, 1, capacity);
    const double least = (double)(T < capacity ? T : capacity) * elements;
    const int64_t chunk = strcmp(c.op, "wkv4") ? 64 : 32; /* fewest tokens of a chunk */
    const double most = ((double)(T / chunk + 1) + (double)(T < capacity ? T : capacity)) * elements;
    const gt_status status = test_table(&c)->calls.workspace(&c.args, &need);
    if (largest * (double)capacity > limit) {
        test_check(status == GT_ERROR_SIZE, "%s %s: status %d", c.op, c.name, status);
        return;
    }
    if (!test_check(status == GT_OK, "%s %s, T %lld, capacity %lld: %s", c.op, c.name, (long long)T,
                    (long long)capacity, gt_last_error()))
        return;
    const double saved = (double)need.saved, backward = (double)need.backward;
    test_check(!strcmp(c.op, "conv1d") ||
                   (2 * least <= saved && saved <= 4.6 * most + 1e6 && 2 * least <= backward && backward < 4e18),
               "%s %s, T %lld, capacity %lld: saved %g or backward %g does not fit the bytes of the states, %g to %g",
               c.op, c.name, (long long)T, (long long)capacity, saved, backward, least, most);
}

/* Whether a tensor is an activation or a parameter of the pass, and no state. */
static int is_plain(const test_case *c, const gt_tensor *t, gt_pass pass) {
    return (test_is_input(t, pass) || test_is_output(t, pass)) && !strchr("SQCER", t->shape[0]) && t->kind != 'i' &&
           !test_is(t, "z") && !test_is(t, "dz") && test_count(c, pass, t) > 0;
}

/* Runs 40 tokens of three sequences in a call with room for `capacity` sequences.  *outputs receives the outputs of all
 * passes. */
static size_t run_packed(const test_case *sizes, int64_t capacity, char **outputs) {
    const gt_pass passes[] = {GT_FORWARD, GT_BACKWARD};
    const int32_t count = 3;
    const gt_op *op = test_table(sizes);
    int32_t *const borders = calloc((size_t)capacity + 1, 4);
    test_case c = *sizes;
    size_t bytes = 0;
    borders[1] = borders[2] = 7, borders[3] = 40;
    test_set_size(&c, 'B', 1);
    test_set_size(&c, 'T', 40);
    test_set_sequences(&c, 3, capacity);
    *outputs = NULL;
    for (int p = 0; p < 2; p++) {
        char *memory[TEST_TENSORS] = {NULL}, *workspace;
        test_args args = c.args;
        gt_workspace need;
        const void *const packed[] = {borders, &count};
        int i = 0;
        memcpy((char *)&args + test_tensor_of(&c, "cu_seqlens")->offset, &packed[0], sizeof packed[0]);
        memcpy((char *)&args + test_tensor_of(&c, "seq_count")->offset, &packed[1], sizeof packed[1]);
        for (const gt_tensor *t = op->tensors; t->name; t++, i++) {
            if (!is_plain(&c, t, passes[p])) continue;
            const int64_t n = test_count(&c, passes[p], t), element = test_dtype_of(&c, t) == GT_F32 ? 4 : 2;
            test_random random = {(uint64_t)t->offset};
            test_map map;
            const test_fill fill = test_fill_of(&c, t, &map);
            memory[i] = malloc((size_t)(n * element));
            for (int64_t k = 0; k < n; k++) {
                const double drawn = fill.mean + fill.spread * test_normal(&random);
                const float x = (float)(map == TEST_AS_IS ? drawn : map == TEST_EXP ? exp(drawn) : -exp(drawn));
                const uint16_t bits = test_dtype_of(&c, t) == GT_BF16 ? gt_f32_to_bf16(x) : gt_f32_to_f16(x);
                memcpy(memory[i] + k * element, element == 4 ? (const void *)&x : &bits, (size_t)element);
            }
            memcpy((char *)&args + t->offset, &memory[i], sizeof memory[i]);
        }
        gt_status status = op->calls.workspace(&args, &need);
        const size_t scratch = p ? need.backward : need.forward;
        workspace = malloc(scratch + 1);
        memcpy((char *)&args + op->fields.workspace, &workspace, sizeof workspace);
        memcpy((char *)&args + op->fields.workspace_bytes, &scratch, sizeof scratch);
        if (status == GT_OK) status = op->calls.pass[passes[p]](&args, NULL);
        test_check(status == GT_OK, "%s %s, capacity %lld: %s", c.op, c.name, (long long)capacity, gt_last_error());
        i = 0;
        for (const gt_tensor *t = op->tensors; t->name; t++, i++) {
            if (!memory[i]) continue;
            if (t->shape[0] == 'B' && test_is_output(t, passes[p])) {
                const size_t n = (size_t)test_count(&c, passes[p], t) * (test_dtype_of(&c, t) == GT_F32 ? 4 : 2);
                *outputs = realloc(*outputs, bytes + n);
                memcpy(*outputs + bytes, memory[i], n);
                bytes += n;
            }
            free(memory[i]);
        }
        free(workspace);
    }
    free(borders);
    return bytes;
}

/* Three sequences must give the same bits in a call with room for a million sequences. */
static void check_large_capacity(const test_case *sizes, gt_dtype dtype) {
    char *few, *many;
    test_case c = *sizes;
    test_set_dtype(&c, dtype, GT_DTYPE_DEFAULT);
    const size_t bytes = run_packed(&c, 3, &few), others = run_packed(&c, 1 << 20, &many);
    test_check(bytes == others && bytes > 0 && !memcmp(few, many, bytes), "%s %s: a large capacity changes results",
               c.op, c.name);
    free(few);
    free(many);
}

/* Calls with too many segments or chunks for the tensor-core kernels must go to the any-size kernels. */
static void test_many_parts(void) {
    gt_wkv6_args a = {.B = 1, .T = 1 << 20, .H = 1 << 11, .N = 32, .seq_capacity = 1 << 20, .dtype = GT_BF16};
    gt_ssd_args s = {.B = 1, .T = 1 << 20, .H = 1 << 9, .P = 8, .N = 16, .seq_capacity = 1 << 20, .dtype = GT_BF16};
    expect(&a, "any-size kernels: segments or chunks of heads are 2^30 or more");
    a.H = 1 << 9;
    expect_not(&a, "any-size");
    a.H = 1 << 11, a.T = 100; /* few chunks, but too many segments: one for each sequence and head */
    expect(&a, "any-size kernels: segments or chunks of heads are 2^30 or more");
    a.seq_capacity = 1 << 18;
    expect_not(&a, "any-size");
    a.segments = 1 << 20, a.T = 1 << 24, a.H = 2, a.seq_capacity = 1 << 16;
    expect(&a, "any-size");
    expect_ssd(&s, "forward: clear_unused_kernel, forward_kernel;");
    s.H = 1 << 7;
    expect_ssd(&s, "forward: clear_unused_kernel, forward_hopper_kernel;");
}

static void check_capacities(const test_op *op) {
    for (const test_case *c = op->sizes; c->op; c++) {
        check_memory(c, 65536, 65536);
        check_memory(c, INT32_MAX, 65536);
        check_memory(c, INT32_MAX, INT32_MAX - 1);
    }
    for (int i = 0; i < 4 && op->sizes[i].op; i++) check_large_capacity(&op->sizes[i], i % 2 ? GT_F32 : GT_BF16);
}

int main(void) {
    if (machine_start()) return 77;
    for (int i = 0; test_ops[i]; i++) {
        for (const test_case *c = test_ops[i]->cases; c->op; c++) check_case(c);
        for (const test_case *c = test_ops[i]->packed; c && c->op; c++) check_case(c);
    }
    test_group("all", "paths");
    for (int i = 0; test_ops[i]; i++)
        if (test_takes_packed(test_ops[i])) check_queries(test_ops[i]);
    test_group("all", "queries at any capacity");
    for (int i = 0; test_ops[i]; i++)
        if (test_takes_packed(test_ops[i])) check_capacities(test_ops[i]);
    test_group("all", "memory and results at large capacities");
    test_many_parts();
    test_wkv6();
    test_errors();
    test_group("wkv6", "reasons");
    test_ssd();
    test_selective_scan();
    test_steps_of_two();
    test_rows_of_conv_ssd();
    test_mixed_path();
    test_grid_of_both();
    test_ssd_memory();
    test_group("ssd", "kernels");
    test_norms();
    test_linear_step();
    test_group("norms", "kernels");
    return test_finish();
}
