-- A scorer's hand-off: packets it has scored go on to the next scorer, or to the rollouts stream. Those of groups
-- that have ended go straight there, sent by the scorer or the grouper.
-- KEYS  void, stream: scoring, target: scoring | rollouts, ledger
-- ARGV  consumer group, '1' if the next stream is the rollouts stream, then for each entry: entry id, group id,
--       payload key, bytes, fencing epoch, members, member table
-- Returns  number of entries passed on; one that somebody else has finished, so that the stream lacks it, is skipped (XACK
--          cannot tell: an entry that the grouper sends on need not be pending, as no scorer may have read it), and so
--          is one whose id another packet has: a server whose clock was set back, and that has lost writes, gives ids
--          a second time; or the error STREAMEND: the target takes no more entries; those before are passed on
-- include count
local PACKET_ARGS = 7
local passed, members, ended = 0, 0, nil

local function has_payload(fields, payload)
  for i = 1, #fields, 2 do
    if fields[i] == 'payload' then return fields[i + 1] == payload end
  end
  return false
end

for at = 3, #ARGV, PACKET_ARGS do
  local entry = redis.call('XRANGE', keys.stream, ARGV[at], ARGV[at])[1]
  if not entry or has_payload(entry[2], ARGV[at + 2]) then
    if entry then
      local id = redis.pcall('XADD', keys.target, '*', 'group_id', ARGV[at + 1], 'payload', ARGV[at + 2],
        'bytes', ARGV[at + 3], 'epoch', ARGV[at + 4], 'members', ARGV[at + 5], 'table', ARGV[at + 6])
      if id.err then
        ended = redis.error_reply('STREAMEND ' .. keys.target .. ' takes no more entries: ' .. id.err)
        break
      end
      local _, lines = string.gsub(ARGV[at + 5], '\n', '')
      passed, members = passed + 1, members + lines
    end
    redis.call('XACK', keys.stream, ARGV[1], ARGV[at])
    redis.call('XDEL', keys.stream, ARGV[at])
  end
end
if ARGV[2] == '1' then
  count('scoring', -members)
  count('scoring_packets', -passed)
  count('rollouts', members)
  count('rollouts_packets', passed)
  write_counts()
end
return ended or passed
