// What kernels that are compiled outside the core link against; the rest of the core is hidden.
#pragma once

#define MPK_KERNEL_API __attribute__((visibility("default")))
