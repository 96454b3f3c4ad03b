import type { ComponentChildren } from "preact";

import { useLive } from "../live";

export function PageHead(props: { title: string; sub?: ComponentChildren; crumb?: [string, string]; children?: ComponentChildren }) {
  const { link } = useLive();
  return (
    <div class="page-head">
      {props.crumb && (
        <a class="crumb" href={props.crumb[1]}>
          {props.crumb[0]}
        </a>
      )}
      <h1>{props.title}</h1>
      {props.sub && <span class="sub">{props.sub}</span>}
      <div class="right">
        {props.children}
        <span class={`link-state ${link}`} role="status">
          <i aria-hidden="true" />
          {{ live: "Live", connecting: "Connecting", lost: "Reconnecting" }[link]}
        </span>
      </div>
    </div>
  );
}
