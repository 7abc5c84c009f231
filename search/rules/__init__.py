"""What every state keeps to: legal kernels, no circles, values that leave where somebody reads them."""
