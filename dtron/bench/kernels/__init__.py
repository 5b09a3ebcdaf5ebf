"""`dtron bench kernels`: single kernels against a reference and the limit of the device."""
