import { render } from "preact";

import { token } from "./api";
import { App } from "./app";
import "./style.css";

// `raytide page` opens the page with the token behind the `#`, which browsers send to nobody.
const given = /^#token=([^&]+)$/.exec(location.hash);
if (given) {
  token.set(decodeURIComponent(given[1]));
  history.replaceState(null, "", location.pathname);
}
render(<App />, document.getElementById("app")!);
