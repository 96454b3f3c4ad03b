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
    "text",
    [
        '#include "copyright.h"\n#include <stdio.h>\nint main(void) {}\n',
        "#region License\n// Copyright 2020 A\n#endregion\nclass A {}\n",
        '"name","license"\n"left-pad","WTFPL"\n"react","MIT"\n',
    ],
)
def test_code_that_begins_like_a_comment_stays(text: str) -> None:
    assert strip_licence_header(text) == text


def test_a_comment_of_vim_goes() -> None:
    assert strip_licence_header('" Copyright 2020 A\n"\n" MIT\nset number\n') == "set number\n"


@pytest.mark.parametrize(
    "text", [CODE, '"""Copies files."""\n' + CODE, "/* never closed, licence\n" + CODE, "", "copyright = 1\n", "#!x\n"]
)
def test_all_else_stays(text: str) -> None:
    assert strip_licence_header(text) == text
