-- now_ms(): the server's clock. Scripts never use a client's.
local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

-- The shard's clock, by which deadlines run: ms since the first `tick`. It goes on with the server's, by at most
-- CLOCK_STEP_MS after each tick, so that a jump of the server's clock hardly moves it.
-- clock: the hash `trainer` has it, '<its time> <the server's> at the last tick', or false before the first; now: now_ms()
local CLOCK_STEP_MS = 5000
local function shard_ms(clock, now)
  local ticked_ms, server_ms = string.match(clock or '', '^(%d+) (%d+)$')
  if not ticked_ms then return 0 end
  return tonumber(ticked_ms) + math.max(0, math.min(now - tonumber(server_ms), CLOCK_STEP_MS))
end
