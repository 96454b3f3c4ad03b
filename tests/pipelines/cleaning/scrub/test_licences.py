import pytest

from raytide.pipelines.cleaning.scrub.licences import strip_licence_header

CODE = "import os\n# a comment\nprint(os)\n"


@pytest.mark.parametrize(
    "header",
    [
        "# Copyright 2024 The Authors.\n# Licensed under X.\n",
        "// SPDX-License-Identifier: MIT\n",
        "/*\n * Copyright (c) 2020\n * All rights reserved.\n */\n\n",
        '"""Copyright 2020 A.\n\nLicensed under the Apache License.\n"""\n',
        "-- (c) 2019 somebody\n",
        "<!-- © somebody -->\n",
    ],
)
def test_a_licence_header_goes(header: str) -> None:
    assert strip_licence_header(header + CODE) == CODE


def test_the_line_for_the_interpreter_stays() -> None:
    first = "#!/usr/bin/env python\n# -*- coding: utf-8 -*-\n"
    assert strip_licence_header(first + "# Copyright 2024 A\n" + CODE) == first + CODE


@pytest.mark.parametrize(
    "text", [CODE, '"""Copies files."""\n' + CODE, "/* never closed, licence\n" + CODE, "", "copyright = 1\n", "#!x\n"]
)
def test_all_else_stays(text: str) -> None:
    assert strip_licence_header(text) == text
