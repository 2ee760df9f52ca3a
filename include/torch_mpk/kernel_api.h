// The functions that kernels compiled outside of the core link against. The rest of the core is hidden.
#pragma once

#define MPK_KERNEL_API __attribute__((visibility("default")))
