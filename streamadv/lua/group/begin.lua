-- Admit and open a group before its rollouts are played.
-- KEYS  group, open, groups, ended, ended_before, ledger, trainer, sizes
-- ARGV  those of an admission, see lib/admit; nonce of this call, under which the group knows who has its tickets
-- Returns  {'ok' | 'open', epoch, version or '', slots}   opened, or open already
--          {'ended', letter}                       it has ended
--          {'busy', reason, used, limit ...}       not admitted now
--          {'mismatch', size}                      open with another size
--          {'layout'}                              the run may have another number of shards: read the manifest again
--          {'broken'}                              its hash is not what the scripts wrote
-- include clock
-- include sizes
-- include pacing
-- include admit
-- include play
-- include ended
-- include holders
-- include enter
local spec, nonce = admission_of(ARGV), ARGV[ADMISSION_ARGS + 1]

local tombstone = find_ended(spec.id)
if tombstone then return {'ended', string.sub(tombstone, 1, 1)} end
local _, opened, refused = enter(spec, nonce)
if refused then return refused end
local group = redis.call('HMGET', keys.group, 'epoch', 'version', 'slots', 'holders')
local holders = group[4]
if opened then
  redis.call('HSET', keys.group, 'holders', nonce)
elseif holders and #holders < MAX_HOLDERS and not string.find(holders, nonce, 1, true) then
  redis.call('HSET', keys.group, 'holders', holders .. ' ' .. nonce)
end
return {opened and 'ok' or 'open', group[1], group[2], group[3]}
