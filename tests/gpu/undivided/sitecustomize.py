"""Makes every Python that finds this on its path take the driver for one that has no green contexts."""

from cuda.bindings import driver

driver.cuDeviceGetDevResource = lambda *_: (driver.CUresult.CUDA_ERROR_NOT_SUPPORTED, None)
