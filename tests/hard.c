#include "hard.h"
#include <string.h>

machine_mode hard_plain = {"plain", 1, 0, 0, 0, 0}, hard_saved = {"saved", 1, 1, 0, 0, 0};

static void put_pointer(test_args *args, size_t offset, const void *p) { memcpy((char *)args + offset, &p, sizeof p); }

static void put_int(test_args *args, size_t offset, int x) { memcpy((char *)args + offset, &x, sizeof x); }

static void put_size(test_args *args, size_t offset, size_t n) { memcpy((char *)args + offset, &n, sizeof n); }

/* Sets *args to a forward call for the backward call *backward, which lacks forward's outputs.  Forward's y goes to the
 * buffer `y`, and backward reads this buffer if it reads y.  Forward's other outputs are NULL. */
static void make_forward(const gt_op *table, test_args *args, test_args *backward, char *y) {
    for (const gt_tensor *t = table->tensors; t->name; t++) {
        if (t->use[GT_FORWARD] == 'O') {
            put_pointer(args, t->offset, y);
            if (t->use[GT_BACKWARD] == 'i') put_pointer(backward, t->offset, y);
        } else if (t->use[GT_BACKWARD] == '-' && t->use[GT_FORWARD] != '-') {
            put_pointer(args, t->offset, NULL);
        }
    }
}

static void add_pass(machine_job *job, const gt_op *table, gt_pass pass, test_args args, const gt_workspace *need) {
    put_size(&args, table->fields.workspace_bytes, test_workspace_of(need, pass));
    job->pass[job->passes] = table->calls.pass[pass];
    job->args[job->passes++] = args;
}

gt_status hard_run(const test_runner *r, const test_op *op, gt_pass pass, const void *args, char *memory,
                   size_t bytes) {
    const machine_mode *mode = (const machine_mode *)r->context;
    const gt_op *table = op->table();
    test_args own = {{0}}, forward;
    machine_job job;
    gt_workspace need;
    memcpy(&own, args, op->args_bytes);
    if (mode->gives_saved && op->reads_y && pass == GT_BACKWARD) put_int(&own, op->reads_y, 1);
    gt_status status = table->calls.workspace(&own, &need);
    if (status != GT_OK) return status;
    char *block = machine_allocate(bytes, 1), *y = machine_allocate(bytes, 1);
    char *saved = machine_allocate(need.saved + 1, 1);
    char *workspace = machine_allocate(need.forward + need.backward + 1, 1);
    memset(&job, 0, sizeof job);
    machine_copy(block, memory, bytes);
    test_relocate(table, &own, memory, bytes, block);
    put_pointer(&own, table->fields.workspace, workspace);
    if (mode->gives_saved) {
        put_pointer(&own, table->fields.saved, saved);
        put_size(&own, table->fields.saved_bytes, need.saved);
    }
    forward = own;
    if (pass == GT_BACKWARD) make_forward(table, &forward, &own, y);
    if (mode->gives_saved && pass == GT_BACKWARD) add_pass(&job, table, GT_FORWARD, forward, &need);
    add_pass(&job, table, pass, own, &need);
    status = machine_run(&job, 1, mode);
    machine_copy(memory, block, bytes);
    machine_release(block), machine_release(y), machine_release(saved), machine_release(workspace);
    return status;
}

double *hard_array(const test_case *c, const test_values *values, const char *tensor) {
    return values->of[test_find(test_table(c), tensor)];
}
