"""Where the plugin meets JAX and XLA: the hook, the compile that is wrapped, executables and their devices."""
