"""`python -m minillm.grading`: write every generated file of the exercises, and the digests of their graders."""

import sys

from minillm.grading.stubs import main

sys.exit(main())
